"""The virtual clock under its former name."""

from roll_lite.simulator.clock import run_virtual

__all__ = ["run_virtual"]
