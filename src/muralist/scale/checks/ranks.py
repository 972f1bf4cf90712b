"""What the ranks of a launch find out together: who comes, how fast, which clock is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.words import listed

if TYPE_CHECKING:
    from muralist.scale.meeting import Exchange

_ALONE = "one process: `muralist launch --nproc N doctor ...` (or torchrun, srun) tests the exchange between ranks"
_SKEW_MATTERS, _SKEW_HURTS = 1.0, 60.0  # seconds


def _alone(around: Circumstances) -> Finding:
    return skipped(_ALONE)


def judge_exchange(found: Exchange) -> Finding:
    """Whether any rank holds the others up."""
    speeds = ", ".join(f"{rate / 1e9:.2f} GB/s for {size / 2**20:g} MiB" for size, rate in found.bandwidths.items())
    machines = len(set(found.hosts))
    told = f"{len(found.hosts)} ranks on {machines} machine{'s' if machines > 1 else ''} exchange {speeds}"
    facts = {
        "bytes per second": found.bandwidths[max(found.bandwidths)],
        "compute, seconds by rank": found.compute,
        "sending, seconds by rank": found.sending,
    }
    if slow := found.slow_ranks():
        return warning(f"{told}; but {listed(slow)}.", facts=facts)
    return ok(told, facts=facts)


def judge_clocks(found: Exchange) -> Finding:
    """Whether the machines agree on the time."""
    if len(set(found.hosts)) < 2:
        return skipped("all ranks are on one machine")
    host, (ahead, doubt) = max(found.clocks.items(), key=lambda item: abs(item[1][0]))
    where = "ahead of" if ahead > 0 else "behind"
    told = f"the clock of {host} is {abs(ahead):.3f} s {where} {found.hosts[0]}'s (± {doubt:.3f} s)"
    facts = {f"{name}, seconds ahead": offset for name, (offset, _) in found.clocks.items()}
    if abs(ahead) - doubt > _SKEW_HURTS:
        return failed(f"{told[0].upper()}{told[1:]}.", facts=facts)
    if abs(ahead) - doubt > _SKEW_MATTERS:
        return warning(f"{told[0].upper()}{told[1:]}.", facts=facts)
    return ok(f"the furthest: {told}", facts=facts)


COLLECTIVE = Check(
    name="collective test",
    what="Under a launcher: whether all ranks come, how many bytes a second they exchange, and which rank computes or sends "
    "slower than the others.",
    trouble="Guide 2: NCCL timeout (`timedelta(seconds=36000)`); guide 3: NCCL timeout (order of barriers, "
    "all GPUs at the same step)",
    why="In training every step waits for the slowest rank, and for ever for one that does not come.",
    remedy="Look at the machine that is named: is it alive, can it reach MASTER_ADDR at MASTER_PORT (firewall, "
    "NCCL_SOCKET_IFNAME), does another program use its GPU or its network? In training --dist_timeout says how "
    "long is waited.",
    look=_alone,
)
CLOCKS = Check(
    name="clocks",
    what="Under a launcher on several machines: how far their clocks are apart.",
    trouble="Guide 2: several machines (SLURM)",
    why="Logs of several machines cannot be put in order, and what is newest on a shared disk is judged wrongly.",
    remedy="Let the machines take their time from one server (chrony, ntpd); `timedatectl` says whether they do.",
    look=_alone,
)
CHECKS = [COLLECTIVE, CLOCKS]
