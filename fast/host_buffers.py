"""Copies of a rank's tensors in host memory, so that a save goes on while the next steps run."""
import torch

from ops.accelerator import stream_module


class HostBuffers:
    """Host memory for the shards of one rank, allocated once and used by every save.

    Where a stream copies, the memory is pinned.
    """
    CHUNK = 1 << 30  # bytes; torch's pinned allocator rounds up to a power of two, so allocate powers of two
    free_bytes = 0  # at the end of the last chunk

    def __init__(self):
        self.buffers = {}  # number of a shard: its host tensor
        self.stream = None

    def copy(self, shards):
        """Copy the tensors of [(name, tensor, full shape, offset)] to the host.

        Return the same list with the copies, and an event: after it the tensors may change. The event is None
        where the copies are complete at once.
        """
        module = stream_module(shards[0][1].device) if shards else None
        if module is None:
            return self.copies(shards, non_blocking=False), None

        self.stream = self.stream or module.Stream()
        self.stream.wait_stream(module.current_stream())  # the step's update comes first
        with module.stream(self.stream):
            copies = self.copies(shards, non_blocking=True)
            return copies, self.stream.record_event()

    def copies(self, shards, non_blocking):
        """Return shards with the host's copies of their tensors."""
        copies = []
        for i, (name, tensor, *place) in enumerate(shards):
            copy = self.buffer(i, tensor).copy_(tensor, non_blocking=non_blocking)
            copies.append((name, copy, *place))
        return copies

    def buffer(self, i, tensor):
        """Return the host tensor for shard number i, of the tensor's shape and dtype."""
        buffer = self.buffers.get(i)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            memory = self.allocate(tensor.numel() * tensor.element_size())
            buffer = memory.view(tensor.dtype).view(tensor.shape)
            self.buffers[i] = buffer
        return buffer

    def allocate(self, n):
        """Return (n,) uint8 of host memory, aligned to 64 bytes. Pinned memory comes in chunks."""
        if self.stream is None:
            return torch.empty(n, dtype=torch.uint8)
        if n > self.free_bytes:
            self.chunk = torch.empty(max(n, self.CHUNK), dtype=torch.uint8, pin_memory=True)
            self.free_bytes = self.chunk.numel()
        start = self.chunk.numel() - self.free_bytes
        aligned = -(-n // 64) * 64
        self.free_bytes = max(0, self.free_bytes - aligned)
        return self.chunk[start:start + n]
