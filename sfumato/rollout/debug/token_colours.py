"""A page that shows tokens of a rollout in colours: by their advantages, and by how their probabilities have moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from sfumato.config.characters import printable
from sfumato.config.writing import write_atomically
from sfumato.rollout.debug.dumps import RolloutDump
from sfumato.tracking.page import POLICY

MAX_TOKENS = 2_000
"""Most tokens of a sequence that a page shows; the first ones."""
ADVANTAGE = "advantage"
PROXIMAL = "proximal_log_probs"
"""Log-probs at the start of the update, from which those of the rollout are subtracted."""

_CSS = """
body{margin:24px auto;max-width:1100px;padding:0 16px;font:14px/1.7 ui-monospace,Menlo,Consolas,monospace;color:#111;
background:#fff}h1{font-size:20px}h2{font-size:14px;margin:28px 0 6px}p{margin:6px 0;white-space:pre-wrap;
overflow-wrap:anywhere;unicode-bidi:isolate}.given{color:#767676}small{color:#767676}
b{font-weight:400;background:rgba(var(--hue),var(--much))}
"""
_UP = "22,140,70"
_DOWN = "205,45,45"
"""Green and red, as CSS has them."""


def write_token_page(
    path: Path, dump: RolloutDump, decode: Callable[[int], str], samples: Sequence[int] | None = None
) -> Path:
    """Writes one HTML file, which opens offline, with the tokens of some samples.

    Each sequence stands there coloured by the advantages of its tokens and, where the update computed them, by the
    difference of log-probs at its start from those of the rollout: green above 0, red below. The strongest colour is
    the largest absolute value on the page, which the page names; values that are not finite are solid red. The value of
    a token is shown under the pointer.

    Args:
        path: where to.
        dump: the rollout, with the values of its tokens.
        decode: turns a token id into its text.
        samples: sample ids; by default the four with the highest and the four with the lowest advantages.

    Raises:
        ValueError: when a sample is not in the dump.
    """
    rollout = dump.rollout
    order = torch.argsort(dump.advantages.values, descending=True, stable=True).tolist()
    rows = sorted({*range(4), *range(len(order) - 4, len(order))} & set(range(len(order))))
    chosen = [order[row] for row in rows]
    if samples is not None:
        if missing := sorted(set(samples) - set(rollout.sample_ids)):
            raise ValueError(f"samples {missing} are not among the {len(order)} of this dump")
        chosen = [rollout.sample_ids.index(sample) for sample in samples]
    token_values = dump.token_values
    values = {ADVANTAGE: token_values["advantages"]}
    if PROXIMAL in token_values:
        values["log-prob difference"] = token_values[PROXIMAL] - token_values["rollout_log_probs"]
    split = {name: by_token.split(rollout.num_rows) for name, by_token in values.items()}
    is_trained = [True] * len(order)
    if PROXIMAL in token_values:  # which is 0 throughout in samples that are not learned from
        is_trained = [bool(log_probs.any()) for log_probs in token_values[PROXIMAL].split(rollout.num_rows)]
    shown_rows = {name: [row for row in chosen if is_trained[row] or name == ADVANTAGE] for name in split}
    largest = {
        name: max((_largest_finite(parts[row]) for row in shown_rows[name]), default=0.0)
        for name, parts in split.items()
    }
    legend = " · ".join(f"{name}: strongest colour at ±{value:.4g}" for name, value in largest.items())
    body = [f"<h1>Rollout of step {dump.step}</h1><p><small>{legend}</small></p>"]
    for row in chosen:
        total = float(dump.advantages.values[row])
        body.append(f"<h2>sample {rollout.sample_ids[row]} · advantage {total:+.4g}</h2>")
        first_decision = 0
        for sequence in rollout.sequences[row]:
            tokens = sequence.token_ids.tolist()
            is_drawn = sequence.drawn.tolist()
            for name, parts in split.items():
                if row not in shown_rows[name]:
                    body.append(f"<p><small>{name}: this sample is not learned from</small></p>")
                    continue
                of_sequence = parts[row][first_decision : first_decision + sequence.num_drawn]
                pieces = [decode(token) for token in tokens[:MAX_TOKENS]]
                shown = _colour_tokens(pieces, is_drawn, of_sequence, largest[name])
                hidden = f" … {len(tokens) - MAX_TOKENS:,} more tokens" if len(tokens) > MAX_TOKENS else ""
                body.append(f"<p><small>{name}{hidden}</small>\n{shown}</p>")
            first_decision += sequence.num_drawn
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>sfumato rollout</title>'
        f"<style>{_CSS}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )
    write_atomically(path, page.encode("utf-8"))
    return path


def _largest_finite(values: Tensor) -> float:
    """The largest absolute value of those that are finite; 0 where none is."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if len(finite) else 0.0


def _colour_tokens(pieces: Sequence[str], drawn: Sequence[bool], values: Tensor, largest: float) -> str:
    """HTML of the first tokens of a sequence.

    Args:
        pieces: texts of the tokens that are shown.
        drawn: whether the policy drew each of the sequence's tokens.
        values: of its drawn tokens, in their order.
        largest: the absolute value that has the strongest colour.
    """
    remaining = iter(values.tolist())
    spans = []
    for piece, is_drawn in zip(pieces, drawn, strict=False):  # a long sequence has more tokens than are shown
        text = escape(printable(piece))
        if not is_drawn:
            spans.append(f'<span class="given">{text}</span>')
            continue
        value = next(remaining)
        hue = _UP if 0 < value < math.inf else _DOWN
        opacity = 1.0
        if math.isfinite(value):
            opacity = abs(value) / largest * 0.7 if largest > 0 else 0.0
        spans.append(f'<b style="--hue:{hue};--much:{opacity:.2f}" title="{value:+.4g}">{text}</b>')
    return "".join(spans)
