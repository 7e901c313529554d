"""What regard finds on this machine, and whether it computes right here: what ``regard doctor`` prints."""

from regard.doctor.examine import examine

__all__ = ["examine"]
