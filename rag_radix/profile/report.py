"""A profile as text."""

from __future__ import annotations

from rag_radix.profile.file import HitTimes, Profile, Spread


def format_report(profile: Profile) -> str:
    """Tables of the measured costs and of what a hit saves, for a terminal."""
    return "\n\n".join([_heading(profile), _costs(profile), _hits(profile), _verdict(profile)])


def _heading(profile: Profile) -> str:
    served = profile.conditions
    return (
        f"{served.model} on {served.device}, SGLang {served.sglang_version}, "
        f"{served.attention_backend} attention, page {served.page_size}, TP {served.tp_size}\n"
        f"median of {profile.repeats} samples each, {profile.discarded_samples} discarded; "
        f"spread (IQR / median): {_spreads(profile)}"
    )


def _spreads(profile: Profile) -> str:
    spreads = [spread.relative_iqr for row in profile.table for spread in row if spread]
    return f"mean {sum(spreads) / len(spreads):.0%}, largest {max(spreads):.0%}"


def _costs(profile: Profile) -> str:
    lines = ["seconds to prefill   new tokens", f"{'cached':>8}"]
    lines[1] += "".join(f"{new:>10,}" for new in profile.new_tokens)
    for cached, row in zip(profile.cached_tokens, profile.table, strict=True):
        cells = (f"{spread.median_s:>10.4f}" if spread else f"{'-':>10}" for spread in row)
        lines.append(f"{cached:>8,}" + "".join(cells))
    return "\n".join(lines)


def _hits(profile: Profile) -> str:
    lines = [
        f"seconds to prefill a prefix and {profile.rest_tokens} new tokens",
        f"{'prefix':>8}{'cold':>10}{'device hit':>12}{'':>8}{'host hit':>12}",
    ]
    for hit in profile.hits:
        lines.append(
            f"{hit.cached_tokens:>8,}{hit.cold.median_s:>10.4f}"
            f"{_times(hit, hit.device)}{_times(hit, hit.host)}"
        )
    return "\n".join(lines)


def _times(hit: HitTimes, spread: Spread | None) -> str:
    if spread is None:
        return f"{'-':>12}{'':>8}"
    return f"{spread.median_s:>12.4f}{hit.cold.median_s / spread.median_s:>7.1f}x"


def _verdict(profile: Profile) -> str:
    lines = [f"host hits: {profile.host_problem}"] if profile.host_problem else []
    measured = [hit.cached_tokens for hit in profile.hits if hit.host]
    if measured:
        match profile.host_pays_from:
            case "always":
                where = "at every length"
            case "never":
                where = "at no length for good"
            case length:
                where = f"from {length:,} tokens on"
        lines.append(
            f"loading from host beats recomputing {where} (measured from {measured[0]:,} to "
            f"{measured[-1]:,} tokens)"
        )
    return "\n".join(lines)
