"""Errors that a user can cause. Each message names the key or file, what was expected, what was
found and how to mend it.

To add one: subclass `WayfinderError` and the built-in type that it refines, and keep the plain
`(message)` constructor, because errors cross process boundaries by pickling.
"""


class WayfinderError(Exception):
    """Root of every error with a message for the user."""

    exit_code = 1  # of run.py


class ConfigError(WayfinderError, ValueError):
    """The composed configuration cannot run. The message lists every violation."""

    exit_code = 2


class RunDirError(WayfinderError, OSError):
    """The run directory cannot be used: unwritable, locked, or it belongs to another config."""


class RunRefusedError(RunDirError):
    """It is in use, or holds something else than this run. Nothing was started or changed."""

    exit_code = 2


class ModelError(WayfinderError, ValueError):
    """A model directory or a processor does not fit what the config asks for."""


class TemplateError(WayfinderError, ValueError):
    """The chat template cannot be used append-only."""


class EnvError(WayfinderError, RuntimeError):
    """An environment cannot be made, or broke its protocol."""


class InvariantError(WayfinderError, RuntimeError):
    """Tokens or images of engine and trainer disagree. The run stops; nothing is repaired."""


class MismatchError(WayfinderError, RuntimeError):
    """Log-probabilities of engine and trainer differ by more than `algorithm.mismatch.stop`."""


class UpdateError(WayfinderError, RuntimeError):
    """An update would have made the policy unusable."""


class SyncError(WayfinderError, RuntimeError):
    """An adapter could not be published, verified, loaded or proved."""


class AdapterFileError(SyncError):
    """Files of a published adapter are missing, cut, changed or cannot be written. Storage may come
    back, and the rank that wrote them can write them again."""


class CheckpointError(WayfinderError, RuntimeError):
    """A checkpoint is half-written, corrupt, foreign or of a newer format."""


class ClusterError(WayfinderError, RuntimeError):
    """The cluster cannot give what the config asks for, or a worker was lost for good."""


class WorkerLostError(ClusterError):
    """A worker died or stopped answering. Its work can be done again by one in its place."""


class JobFailedError(WayfinderError, RuntimeError):
    """A job of a multirun failed in a process of its own; the message is all that came from it."""
