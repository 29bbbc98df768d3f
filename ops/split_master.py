"""fp32 masters of bf16 weights, kept as the weights and the 16 bits that rounding took from each.

The bits of a bf16 number are the upper half of an fp32 number's. So own, followed by 16 zero bits, is near
its master. The difference of the two, as 32-bit integers, is low, between -32,768 and 32,768:

    master  0.1234567      3DFCD6DE   as fp32
    own     0.12353515625  3DFD       rounded to bf16: the nearest, the even one at equal distance
    low     -10,530                   3DFCD6DE - 3DFD0000

So a master takes 2 bytes in the place of 4, because the model has own anyway (arXiv:2005.04680). At equal
distance low is cut to 32,767 or -32,767, which moves one master of 65,536 by one unit in the last digit:
it then rounds to own, and to read it and write it again changes nothing.
"""
import torch

LARGEST = 2**15 - 1


def joined(own, low):
    """Return the masters (n,) fp32 of own (n,) bf16 and low (n,) int16."""
    bits = own.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += low
    return bits.view(torch.float32)


def low_bits(master, own):
    """Return low (n,) int16 of master (n,) fp32 and own (n,) bf16, which is master rounded."""
    bits = own.view(torch.int16).to(torch.int32)
    bits <<= 16
    torch.sub(master.view(torch.int32), bits, out=bits)
    return bits.clamp_(-LARGEST, LARGEST).to(torch.int16)


class SplitMaster:
    """Stands for a tensor of fp32 masters: parts of it, its shape, and copies into it are as a tensor's."""
    dtype = torch.float32

    def __init__(self, own, low):
        self.own = own
        self.low = low

    @classmethod
    def of(cls, own, master):
        return cls(own, low_bits(master, own))

    @property
    def shape(self):
        return self.low.shape

    @property
    def device(self):
        return self.low.device

    def numel(self):
        return self.low.numel()

    def __getitem__(self, where):
        return SplitMaster(self.own[where], self.low[where])

    def view(self, shape):
        return SplitMaster(self.own.view(shape), self.low.view(shape))

    def aminmax(self):
        return self.own.aminmax()

    def copy_(self, values):
        values = values.to(self.low.device, torch.float32)
        self.own.copy_(values)
        self.low.copy_(low_bits(values, self.own))


def whole(tensor):
    if isinstance(tensor, SplitMaster):
        return joined(tensor.own, tensor.low)
    return tensor
