"""The application that the checks of `check` and `doctor` examine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from otel_limits.bindings.known import importable_frameworks, installed_entry_points, know
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework
    from otel_limits.bindings.third_party import Installed
    from otel_limits.cli.doctor.launcher import Launcher, UnknownLauncherError
    from otel_limits.core.policy import Policy
    from otel_limits.settings.policy.document import Document
    from otel_limits.settings.settings_reader import Reading
    from otel_limits.settings.table import Settings


@dataclass(frozen=True)
class Context:
    """An application, as its environment and the arguments of the command describe it."""

    environ: Mapping[str, str]
    """Its variables."""
    agent: str | None = None
    """The only agent of interest."""
    probe: bool = False
    """Whether to import the frameworks."""
    model: str | None = None
    """A model ID that must have a price."""
    launcher: Launcher | UnknownLauncherError | None = None
    """The command that starts it."""

    @cached_property
    def reading(self) -> Reading:
        """Its settings with their sources and mistakes."""
        return read_settings(self.environ)

    @property
    def settings(self) -> Settings:
        """Its settings."""
        return self.reading.settings

    @cached_property
    def policy_file(self) -> PolicyFile:
        """Its policy file."""
        return PolicyFile(self.settings.policy_path)

    @property
    def document(self) -> Document:
        """The content of its policy file."""
        return self.policy_file.document

    @cached_property
    def policies(self) -> Mapping[str, Policy]:
        """The policy of the agent of interest; else that of each entry and of all other agents."""
        base = self.settings.policy
        if self.agent is None:
            return self.document.policies(base)
        return {self.agent: self.document.effective(self.agent, base)}

    @property
    def has_limit(self) -> bool:
        """Whether any of these agents has a limit."""
        return any(each.is_capped for each in self.policies.values()) or bool(self.document.quotas)

    @cached_property
    def third_party(self) -> Installed:
        """The frameworks that other distributions limit here."""
        return installed_entry_points()

    @cached_property
    def frameworks(self) -> Sequence[Framework]:
        """The frameworks that programs of this environment would import."""
        know(self.third_party.entry_points)
        return importable_frameworks()
