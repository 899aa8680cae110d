"""`homing` to type in an empty folder, as for the verbs: much of the library is tested through them."""

from tests.cli.conftest import homing

__all__ = ["homing"]
