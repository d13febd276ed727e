"""Whether the machines' clocks agree: logs, timeouts, certificates and leases rely on it."""

from __future__ import annotations

from ottava.doctor.finding import Facts, Finding

MOST_S = 1.0


def judge(facts: list[Facts], names: list[str]) -> list[Finding]:
    """facts: {"time": seconds since 1970} of every rank at one moment."""
    times = [fact["time"] for fact in facts]
    usual = sorted(times)[len(times) // 2] if len(times) > 2 else times[0]
    found = []
    for rank, (name, value) in enumerate(zip(names, times)):
        if abs(value - usual) > MOST_S:
            way = "ahead of" if value > usual else "behind"
            message = f"{name}: its clock is {abs(value - usual):.1f} s {way} the others: start NTP or chrony there"
            found.append(Finding("clock", "problem", message, (rank,)))
    return found or [Finding("clock", "ok", f"within {max(times) - min(times):.2f} s")]
