"""Copies of a rank's tensors in host memory, so that a save goes on while the next steps run."""
import torch

from ops.accelerator import stream_module
from ops.split_master import SplitMaster


def start_copy(tensor):
    """Start to copy a small tensor to the host. Return (copy, the event after which it is complete).

    The event is None if the copy is the tensor itself: the host has it already.
    """
    module = stream_module(tensor.device)
    if module is None:
        return tensor, None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, module.current_stream().record_event()


class HostBuffers:
    """Host memory for the pieces of one rank, allocated once and used by every save.

    Where a stream copies, the memory is pinned; then torch rounds each piece up to a power of two.
    """

    def __init__(self):
        self.buffers = {}  # number of a piece: its host tensor
        self.stream = None

    def copy(self, pieces):
        """Copy the tensors of [(name, tensor, full shape, offset)] to the host.

        Return the same list with the copies, and an event after which the tensors may change. The event is
        None if the copies are already complete.
        """
        module = stream_module(pieces[0][1].device) if pieces else None
        if module is None:
            return self.copies(pieces, non_blocking=False), None

        self.stream = self.stream or module.Stream()
        self.stream.wait_stream(module.current_stream())  # the step's update comes first
        with module.stream(self.stream):
            copies = self.copies(pieces, non_blocking=True)
            return copies, self.stream.record_event()

    def copies(self, pieces, non_blocking):
        """Return the pieces with host copies of their tensors. A SplitMaster stays one."""
        def host_copy(key, tensor):
            return self.buffer(key, tensor).copy_(tensor, non_blocking=non_blocking)

        copies = []
        for i, (name, tensor, *place) in enumerate(pieces):
            if isinstance(tensor, SplitMaster):
                copy = SplitMaster(host_copy((i, "own"), tensor.own), host_copy((i, "low"), tensor.low))
            else:
                copy = host_copy(i, tensor)
            copies.append((name, copy, *place))
        return copies

    def buffer(self, key, tensor):
        """Return the host tensor of a key, for a piece or a part of it, of the tensor's shape and dtype."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = self.stream is not None
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self.buffers[key] = buffer
        return buffer
