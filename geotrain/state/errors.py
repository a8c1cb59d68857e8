"""The error of everything that reads or writes checkpoints."""

from geotrain.errors import GeotrainError


class CheckpointError(GeotrainError):
    """A checkpoint cannot be written, is not there, is damaged, or belongs to something else.

    The text names the file or tensor, the region where it matters, and the remedy.
    """
