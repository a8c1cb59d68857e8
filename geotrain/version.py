"""The package's version, which all regions of a run must share."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("geotrain")
    except PackageNotFoundError:
        return "0+source"


__version__ = _installed()
