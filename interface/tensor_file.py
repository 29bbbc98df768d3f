"""A safetensors file, written block by block.

Its format: 8 bytes with the length of the header, the header in JSON, then the elements of all tensors.
"""
import json
import os
import zlib

SAFETENSORS_DTYPE = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64",
                     "int32": "I32", "uint8": "U8", "bool": "BOOL"}  # {torch's name: that of the format}
BLOCK = 1 << 24  # bytes written, or read, at once


def dtype_name(tensor):
    """Return torch's name of a tensor's dtype, without the "torch." before it."""
    return str(tensor.dtype).removeprefix("torch.")


def write_safetensors(path, tensors, metadata=None):
    """Write {key: tensor} and metadata {str: str}. Return (bytes, crc32) of the file.

    Unlike the library's function, this one writes block by block without a copy, computes the checksum on the
    way, and releases the interpreter's lock, so that training goes on meanwhile.
    """
    import torch
    # The widest elements come first: so all are aligned.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    head = safetensors_header(tensors, metadata)
    crc = written = 0
    with open(path, "wb", buffering=0) as f:
        def put(block):
            nonlocal crc, written
            crc = zlib.crc32(block, crc)
            written += len(block)
            while len(block):  # an unbuffered write may write a part only
                block = block[f.write(block):]

        put(memoryview(len(head).to_bytes(8, "little") + head))
        for tensor in tensors.values():
            data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            for i in range(0, len(data), BLOCK):
                put(data[i:i + BLOCK])
        os.fsync(f.fileno())
    return written, crc


def safetensors_header(tensors, metadata):
    """Return the header of a safetensors file: JSON, padded with spaces to a multiple of 8 bytes."""
    header = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for key, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": SAFETENSORS_DTYPE[dtype_name(tensor)], "shape": list(tensor.shape),
                       "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    return head + b" " * (-len(head) % 8)
