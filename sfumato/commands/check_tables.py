"""What ``sfumato check`` has found, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sfumato.commands.check_config import DOES_NOT_FIT, WRONG, Findings
from sfumato.commands.check_data import DataFindings, SourceFindings
from sfumato.commands.check_host import HostFindings
from sfumato.commands.check_model import CONTEXT_BYTES, FRAGMENTED, needed_bytes
from sfumato.config.characters import printable


def show_findings(findings: Findings, console: Console) -> None:
    """Prints everything, the verdict last."""
    layout = findings.layout
    axes = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp", "ep")
    sizes = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1)
    shape = f" ({sizes})" if sizes else ""
    _print(console, f"{findings.config}: tasks/{findings.task}.py on {_count_noun(layout.size, 'process')}{shape}")
    if findings.data is not None:
        _show_data(findings.data, console)
    if findings.model is not None:
        _show_model(findings, console)
        _show_memory(findings, console)
    if findings.host is not None:
        _show_host(findings.host, console)
    if findings.not_looked_at:
        _print(console, f"not looked at: {'; '.join(findings.not_looked_at)}")
    for note in findings.notes:
        _print(console, f"note: {note}")
    for problem in findings.problems:
        _print(console, f"error: {problem}")
    _print(console, _format_verdict(findings))


def _format_verdict(findings: Findings) -> str:
    if findings.exit_code == WRONG:
        return f"{_count_noun(len(findings.problems), 'problem')}: the run would stop"
    if findings.host is not None and not findings.host.fits and findings.fits_devices:
        return f"does not fit: {'; '.join(_list_shortages(findings.host))}"
    if findings.exit_code == DOES_NOT_FIT:
        available = f"{_format_bytes(findings.device_bytes)} there ({findings.device})"
        return f"does not fit: {_format_bytes(findings.needed_bytes)} needed, {available}"
    if findings.needed_bytes is None:
        return "nothing is wrong"
    if findings.device_bytes is None:
        return (
            f"nothing is wrong; {_format_bytes(findings.needed_bytes)} needed on each device; memory {findings.device}"
        )
    fraction = findings.needed_bytes / findings.device_bytes
    available = f"{_format_bytes(findings.device_bytes)} ({findings.device})"
    return f"fits: {_format_bytes(findings.needed_bytes)} needed, {fraction:.0%} of {available}"


def _show_data(data: DataFindings, console: Console) -> None:
    is_text = data.tokens is not None
    titles = ["tokens", "in the loss", "longest"] if is_text else []
    table = Table("data", "rows", "looked at", "bad", *titles, title_justify="left")
    for kind, sources in (("", data.training), ("validation: ", data.validation)):
        for source in sources:
            cells = [f"{source.num_rows:,}", f"{source.num_looked_at:,}", f"{len(source.bad_rows):,}"]
            table.add_row(escape(printable(f"{kind}{source.name}")), *cells, *(_token_cells(source) if is_text else ()))
    console.print(table)
    parts = [f"{'' if data.steps_are_exact else 'about '}{data.num_steps:,} steps"] if data.num_steps else []
    if data.tokens is not None:
        parts.append(f"at most {data.tokens_per_step:,} tokens in each")
        how = "" if data.tokens_are_exact else "about (from the rows looked at) "
        parts.append(f"{how}{_format_count(data.tokens)} tokens in one pass over the data")
    if data.images_per_step:
        parts.append(f"{data.images_per_step:,} images in each")
    _print(console, "; ".join(parts))
    for line in data.answers:
        _print(console, line)


def _token_cells(source: SourceFindings) -> list[str]:
    if not source.num_tokens:
        return []
    return [_format_count(source.tokens), f"{source.num_learned / source.num_tokens:.0%}", f"{source.longest:,}"]


def _show_model(findings: Findings, console: Console) -> None:
    model = findings.model
    assert model is not None
    parts = [
        f"{model.kind}: {_format_count(model.num_parameters)} parameters, {_format_count(model.num_trained)} trained"
    ]
    if model.num_active is not None and model.flops_per_token is not None:  # both are there, or neither
        parts.append(f"{_format_count(model.num_active)} met by each token")
        parts.append(f"{_format_count(model.flops_per_token)} operations for each token of a full row")
    _print(console, "; ".join(parts))


def _show_memory(findings: Findings, console: Console) -> None:
    assert findings.model is not None
    ranks = findings.model.ranks
    unit, name = (2**30, "GiB") if findings.model.largest.total >= 2**30 else (2**20, "MiB")

    def cells(sizes: Iterable[float]) -> list[str]:
        return [f"{size / unit:,.2f}" if size else "" for size in sizes]

    titles = ["one rank"] if len(ranks) == 1 else [f"stage {index}" for index in range(len(ranks))]
    table = Table(f"memory in {name}", *titles, title_justify="left")
    for part in dict.fromkeys(part for rank in ranks for part, size in rank.parts.items() if size):
        table.add_row(part, *cells(rank.parts.get(part, 0) for rank in ranks))
    table.add_section()
    table.add_row("all of it at once", *cells(sum(rank.parts.values()) for rank in ranks))
    for phase in dict.fromkeys(phase for rank in ranks for phase in rank.phases):
        table.add_row(phase, *cells(rank.phases.get(phase, 0) for rank in ranks))
    if findings.on_gpu:
        context = f"with {CONTEXT_BYTES // 2**30} GiB of context and {FRAGMENTED:.0%} lost between allocations"
        table.add_row(context, *cells(needed_bytes(rank, on_gpu=True) for rank in ranks))
    table.add_section()
    for part in dict.fromkeys(part for rank in ranks for part in rank.host):
        table.add_row(f"in CPU memory: {part}", *cells(rank.host.get(part, 0) for rank in ranks))
    console.print(table)
    if findings.model.counts_uncompiled:
        _print(console, "activations are those of blocks that are not compiled; compiled ones keep fewer")
    if findings.model.advice:
        advice = Table("what would help", f"{name} needed", "", title_justify="left")
        for change, size in findings.model.advice:
            advice.add_row(change, *cells([size]), "fits" if size <= (findings.device_bytes or 0) else "")
        console.print(advice)


def _list_shortages(host: HostFindings) -> list[str]:
    """What a machine has too little of, with the largest part."""
    lacking = []
    for kind, parts, wanted_bytes, available in (
        ("CPU memory", host.always | host.moments, host.needed_bytes, host.memory_bytes),
        ("disk", host.disk, sum(host.disk.values()), host.disk_bytes),
    ):
        if available is not None and wanted_bytes > available:
            largest = max(parts, key=lambda part: parts[part])
            lacking.append(
                f"{_format_bytes(wanted_bytes)} of {kind} needed, {_format_bytes(available)} there; most by {largest}: "
                f"{_format_bytes(parts[largest])}"
            )
    return lacking


def _show_host(host: HostFindings, console: Console) -> None:
    table = Table(f"CPU memory with {_count_noun(host.processes, 'process')}, and disk", "", title_justify="left")
    rows = {name: size for name, size in (host.always | host.moments).items() if size}
    for name, size in rows.items():
        table.add_row(name, _format_bytes(size))
    table.add_section()
    table.add_row("most CPU memory at a time", _format_bytes(host.needed_bytes))
    table.add_section()
    for name, size in host.disk.items():
        table.add_row(f"on disk: {name}", _format_bytes(size))
    console.print(table)


def _format_bytes(num_bytes: int | None) -> str:
    size = num_bytes or 0
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _format_count(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f} {name}"
    return f"{value:.0f}"


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _print(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
