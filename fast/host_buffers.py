"""Copies of a rank's tensors in host memory, so that a save goes on beside the next steps."""
import torch

from ops.accelerator import stream_module


class HostBuffers:
    """Host memory for one rank's shards, allocated once, used by every save; pinned where a stream copies."""
    CHUNK = 1 << 30  # bytes; torch's pinned allocator rounds up to a power of two, so allocate powers of two
    free_bytes = 0  # in the last chunk

    def __init__(self):
        self.buffers, self.stream = {}, None

    def copy(self, shards):
        """[(name, tensor, full shape, offset)] -> (the same with copies, event: the tensors may change)."""
        module = stream_module(shards[0][1].device) if shards else None
        if module is None:
            return [(n, self.buffer(i, t).copy_(t), *place) for i, (n, t, *place) in enumerate(shards)], None
        self.stream = self.stream or module.Stream()
        self.stream.wait_stream(module.current_stream())  # the step's update comes first
        with module.stream(self.stream):
            copies = [(n, self.buffer(i, t).copy_(t, non_blocking=True), *place)
                      for i, (n, t, *place) in enumerate(shards)]
            return copies, self.stream.record_event()

    def buffer(self, i, t):
        """-> the host tensor for shard i, of t's shape and dtype."""
        if i not in self.buffers or self.buffers[i].shape != t.shape or self.buffers[i].dtype != t.dtype:
            self.buffers[i] = self.alloc(t.numel() * t.element_size()).view(t.dtype).view(t.shape)
        return self.buffers[i]

    def alloc(self, n):
        """-> (n,) uint8, aligned to 64 bytes; pinned memory comes in chunks."""
        if self.stream is None:
            return torch.empty(n, dtype=torch.uint8)
        if n > self.free_bytes:
            self.chunk = torch.empty(max(n, self.CHUNK), dtype=torch.uint8, pin_memory=True)
            self.free_bytes = self.chunk.numel()
        at = self.chunk.numel() - self.free_bytes
        self.free_bytes = max(0, self.free_bytes - -(-n // 64) * 64)
        return self.chunk[at:at + n]
