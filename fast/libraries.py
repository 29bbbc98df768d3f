"""Libraries that a run may take: in the version that was tried, or not at all.

    Library   one of them; fast/flash.py and fast/experts.py say what is special to theirs
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from interface.packages import version_of
from ops.backend import is_hopper


@dataclass(frozen=True)
class Library:
    """A package with kernels for NVIDIA's Hopper GPUs."""
    package: str    # its name, as pip knows it
    tested: str     # the version that was run
    load: Callable  # load() imports what is called of it
    fits: Callable  # fits(cfg): whether a run has work for it, of the kind that was run on a GPU

    def is_taken(self, cfg, device):
        """Whether a run takes the library. plan.py's device has no index.

        The version is compared first. So where the library is not installed, nothing is asked about the GPU:
        a torch that was built for CPUs alone could not answer.
        """
        is_planned = device.index is None
        if is_planned or self.version() != self.tested:
            return False
        return self.would_fit(cfg, device) and not self.problem

    def why_not(self, cfg, device):
        """Return why a run cannot take the library that is installed for it, or ""."""
        return self.problem if self.version() and self.would_fit(cfg, device) else ""

    def would_fit(self, cfg, device):
        """Whether a run would take the library, where it is installed."""
        return self.is_wanted(cfg) and is_hopper(device)

    def is_wanted(self, cfg):
        """Whether a run takes the library on a Hopper GPU, where it is installed."""
        return cfg.kernels != "plain" and self.fits(cfg)

    def version(self):
        """Return the version that is installed, or ""."""
        return version_of(self.package)

    def with_version(self):
        """Return the package and the version that is installed, in words."""
        return f"{self.package} {self.version()}"

    @cached_property
    def problem(self):
        """Why the library cannot be taken, or "". An import that failed is not tried again."""
        version = self.version()
        cure = f"pip install {self.package}=={self.tested}"
        if not version:
            return f"it is not installed; {cure}"
        if version != self.tested:
            return f"version {version} was not tried, {self.tested} was; {cure}"
        try:
            self.load()
        except Exception as e:
            return f"it cannot be imported: {e}"
        return ""
