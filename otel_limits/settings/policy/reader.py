"""Parses a policy file and collects all mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from otel_limits.core.file_parts import KeyPath, Part, mistakes_in
from otel_limits.core.limits import SHARED_LIMITS, file_name
from otel_limits.core.policy import COST
from otel_limits.core.pricing import Prices, missing_prices
from otel_limits.settings.policy import yaml_tree
from otel_limits.settings.policy.document import NO_DOCUMENT, Document, Entry
from otel_limits.settings.policy.models import File, Section, WrittenModel
from otel_limits.settings.policy.yaml_tree import Mistake, Node


def parse(text: str, path: str) -> tuple[Document, tuple[str, ...]]:
    """Parse a policy.

    Returns:
        The document, and a sentence with file, line and key for each mistake. With a mistake, the
        document is empty: a policy is accepted or rejected as a whole.
    """
    root, mistakes = yaml_tree.read(text)
    reader = _Reader(root, mistakes)
    # The valid parts of the YAML are checked as well, to report all mistakes together.
    document = NO_DOCUMENT if mistakes and root.value is None else reader.document(path)
    # By line, because sections are read in a different order.
    ordered = sorted(reader.mistakes, key=lambda mistake: mistake.line)
    sentences = tuple(f"{path}:{each.line}: {each.sentence}" for each in ordered)
    return (NO_DOCUMENT if sentences else document), sentences


class _Reader:
    """Reads a whole file and collects mistakes."""

    def __init__(self, root: Node, mistakes: Iterable[Mistake]) -> None:
        """Start with the mistakes in the YAML itself."""
        self._root = root
        # Collected instead of raised: fixing five mistakes must not take five attempts.
        self.mistakes = list(mistakes)

    def document(self, path: str) -> Document:
        """Read the file."""
        parts = self._valid_parts()
        document = Document(
            path=path,
            defaults=self._entries(parts.get("defaults", Section()), "defaults"),
            agents={
                glob: self._entries(section, "agents", glob)
                for glob, section in parts.get("agents", {}).items()
            },
            **self._prices(parts.get("models", {})),
            tools={
                glob: self._entries(tool, "tools", glob)
                for glob, tool in parts.get("tools", {}).items()
            },
            quotas=self._quotas(parts["quotas"], path) if "quotas" in parts else {},
        )
        self._require_prices(document)
        return document

    def _valid_parts(self) -> dict[str, Any]:
        """Return the sections of the file, without entries that contain mistakes."""
        content = self._root.plain()
        wrong = set()
        for path, sentence in mistakes_in(content, File, self._shown):
            self._refuse(sentence, *path)
            wrong.add(path[:2])
        if not isinstance(content, dict):
            return {}
        valid = {
            name: {key: entry for key, entry in part.items() if (name, key) not in wrong}
            if isinstance(part, dict)
            else part
            for name, part in content.items()
            if (name,) not in wrong
        }
        return File.model_validate(valid).given()

    def _entries(self, part: Part, *path: str) -> dict[str, Entry]:
        """Return the values of a section, named as in the environment."""
        entries: dict[str, Entry] = {}
        for name, value in part.given().items():
            if isinstance(value, Part):
                prefix = f"{name}_" if name in SHARED_LIMITS else ""
                caps = self._entries(value, *path, name)
                entries |= {prefix + cap: entry for cap, entry in caps.items()}
            elif isinstance(value, dict):
                # One entry per tool, so that sections are merged tool by tool.
                for tool, cap in value.items():
                    entries[f"{name}.{tool}"] = self._entry(cap, *path, name, tool)
            else:
                entries[name] = self._entry(value, *path, name)
        return entries

    def _prices(self, models: Mapping[str, WrittenModel]) -> dict[str, dict[str, Entry]]:
        prices, written = {}, {}
        for glob, model in models.items():
            content = self._root.below("models", glob).plain()
            key = next(key for key in ("price", "as", "local") if key in content)
            value = content[key]
            if key == "price" and model.provider:
                value = {**value, "provider": model.provider}
            prices[glob] = self._entry(model.override(), "models", glob, key)
            written[f'models["{glob}"].{key}'] = self._entry(value, "models", glob, key)
        return {"prices": prices, "written_prices": written}

    def _quotas(self, section: object, path: str) -> dict[str, Entry]:
        # Imported here, because most files don't have quotas.
        from otel_limits.quotas.section import read_quotas

        quotas = read_quotas(
            section,
            refuse=lambda path, sentence: self._refuse(sentence, "quotas", *path),
            shown=lambda path: self._shown(("quotas", *path)),
        )
        entries = {name: self._entry(quota, "quotas", name) for name, quota in quotas.items()}
        file = file_name(path)
        return {
            name: replace(entry, value=replace(entry.value, origin=f"{file}:{entry.line}"))
            for name, entry in entries.items()
        }

    def _require_prices(self, document: Document) -> None:
        """Reject cost limits if prices are not available."""
        if Prices(document.price_list()).available:
            return
        named = {f'agents["{glob}"]': entries for glob, entries in document.agents.items()}
        for key, entries in {"defaults": document.defaults, **named}.items():
            for part in ("limits", *SHARED_LIMITS):
                name = f"{part}_{COST}" if part in SHARED_LIMITS else COST
                if name in entries:
                    sentence = f"{key}.{part}.{COST} {missing_prices()}"
                    self.mistakes.append(Mistake(entries[name].line, sentence))
        for name, entry in document.quotas.items():
            if entry.value.unit == "usd":
                sentence = f'quotas["{name}"].usd {missing_prices()}'
                self.mistakes.append(Mistake(entry.line, sentence))

    def _shown(self, path: KeyPath) -> str:
        return self._root.below(*path).shown

    def _entry(self, value: object, *path: str) -> Entry:
        return Entry(value, self._root.below(*path).line)

    def _refuse(self, sentence: str, *path: int | str) -> None:
        self.mistakes.append(Mistake(self._root.below(*path).line, sentence))
