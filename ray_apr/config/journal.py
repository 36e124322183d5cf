"""Settings of the journal: what of the rollouts survives the death of a part."""

from __future__ import annotations

from dataclasses import dataclass

from ray_apr.core.checks import of_type, require


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """Whether, and where, rollouts are noted as they are made."""

    enabled: bool = True
    """Note tokens, rewards and batches since the last checkpoint, so that a rollout worker or a
    buffer that dies begins again beside the trainer, and a run that begins again repeats what it
    did. Without checkpoints the journal has all of the run: 12 bytes a token, and some hundred for
    each note of a sample."""
    path: str | None = None
    """Folder, or URI of pyarrow's file systems, that all nodes reach; each run gets a folder of its
    name in it. None: ``journal`` in the folder of the run's checkpoints."""

    def __post_init__(self) -> None:
        s = "rollout.journal"
        of_type(s, self, bool, "true or false", "enabled")
        of_type(s, self, str | None, "a path, a URI, or null", "path")
        require(self.path != "", f"{s}.path", self.path, "must name a folder, or be null")
        require(
            self.enabled or self.path is None,
            f"{s}.path",
            self.path,
            "is not used with enabled: false; leave it out",
        )
