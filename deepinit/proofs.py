"""The verbs `audit` and `init`: what a tree on disk is, and an initial state to disk."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepinit.errors import ConfigError, unknown

FORMATS = ("orbax", "safetensors")


def audit_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `audit`."""
    parser.add_argument("--against", default="", metavar="PATH", help="another tree: compare the two, leaf by leaf")
    parser.add_argument("--roles", default="", metavar="FILE|PRESET", help="YAML {regex: role}, or a preset's name")
    parser.add_argument("--schemes", default="", metavar="A,B", help="choose among these schemes only")
    parser.add_argument("--strict", action="store_true", help="leaves without a role fail")


def init_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `init`."""
    parser.add_argument("--out", default="", metavar="DIR", help="the folder to write; new or empty")
    parser.add_argument("--format", default="orbax", help="orbax, or safetensors in one file")
    parser.add_argument("--forecast", action="store_true", help="bytes for each device, before anything is allocated")


FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {"audit": audit_flags, "init": init_flags}


def table_from(text: str) -> Any:
    """The table that --roles names: of a file, or a preset."""
    import yaml

    if not text:
        return None
    if not Path(text).is_file():
        from deepinit.interop.tables import preset

        return preset(text)
    try:
        data = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise ConfigError(f"roles: {text}: {str(e).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"roles: {text} holds no mapping from regex to role")
    return {str(k): v for k, v in data.items()}


def audit(path: str, options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Audit a tree on disk."""
    from deepinit.train import config as configs
    from deepinit.train import loader

    if not path:
        raise ConfigError("audit: give the path of a checkpoint, a run, or a safetensors file or folder")
    recipe = configs.load(options.config, flags).recipe() if options.config else None
    sizes: dict[str, Any] = {}
    for layer in loader.flags(configs.Config, flags):
        sizes |= layer.get("model", {})
    from deepinit.interop import sources

    source = sources.load(path)
    if options.against:
        return against(source, sources.load(options.against), options.json)
    from deepinit import audits, certificate
    from deepinit.interop import trees
    from deepinit.schemes import registry

    names = [registry.entry(name).name for name in options.schemes.split(",") if name]
    table = table_from(options.roles)
    found = audits.audit(
        source.params, roles=table, sizes={**source.sizes, **sizes}, recipe=recipe or source.recipe,
        strict=options.strict, schemes=names,
    )  # fmt: skip
    broken: list[str] = []
    if source.certificate:
        broken = certificate.check(source.certificate, dict(trees.flat(source.params)))
    if options.json:
        certified = {"certificate": broken or "every leaf as drawn"} if source.certificate else {}
        print(json.dumps(found.to_json() | certified, indent=1, allow_nan=False))
    else:
        from deepinit.report import audit as report
        from deepinit.report import tables

        out = tables.console()
        report.show(out, found, str(source.path))
        if source.certificate:
            out.print("certificate: " + ("; ".join(broken[:5]) or "every leaf as drawn from its seed"))
    return 0 if found.ok and not broken else 1


def against(a: Any, b: Any, as_json: bool) -> int:
    """Compare two trees."""
    from deepinit import comparison

    rows, facts = comparison.compared(a, b)
    same = all(r["same"] for r in rows)
    if as_json:
        print(json.dumps({"same": same, "records": facts, "leaves": rows}, indent=1))
    else:
        from deepinit.report import audit as report
        from deepinit.report import tables

        report.compare(tables.console(), rows, [f"{a.path} against {b.path}", *facts])
    return 0 if same else 1


def init(path: str, options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Write an initial state, or say what it would take."""
    from deepinit.train.config import load

    if path:
        raise ConfigError(f"init: {path!r} is no flag; the folder is given as --out DIR")
    config = load(options.config, flags)
    config.check()
    if options.format not in FORMATS:
        raise unknown("format", options.format, FORMATS)
    if options.forecast:
        from deepinit import forecasts

        return forecasts.command(config, options.json)
    if not options.out:
        raise ConfigError("init: give the folder to write as --out DIR")
    out = Path(options.out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out: {out} is not empty")
    if config.scheme.sampler != "portable":
        raise ConfigError(f"scheme.sampler: {config.scheme.sampler!r} cannot be certified; 'portable'")
    from deepinit import artefact
    from deepinit.train import birth, folder

    born = birth.born(config)
    if born.verdict.ok:
        artefact.write(
            out, born.params, born.recipe, config.train.seed, born.verdict, folder.versions(), options.format
        )
    if options.json:
        print(json.dumps({"ok": born.verdict.ok, "digest": born.verdict.digest, "out": str(out)}))
    else:
        print(born.verdict.summary() if born.verdict.ok else born.verdict.table())
        print(f"digest {born.verdict.digest}")
        print(f"init: {out}" if born.verdict.ok else "nothing was written")
    return 0 if born.verdict.ok else 1
