"""When would a batch system start a job submitted now? A backfill plan over what `squeue` shows.

Written as plain loops over arrays of seconds, so that the simulator can compile the very same
source for its hot loop (`reclaimnet.sim.slurm.kernel`) while a live watcher runs it as it stands.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = -1


def rising(values: Floats | Ints) -> Ints:
    """Places in rising rank, equals in the rank they came."""
    return np.argsort(values, kind="stable")


def earliest_slot(
    times: Ints, free: Ints, count: int, nodes: int, duration: int, latest: int
) -> int:
    """The first time from which `nodes` are free for `duration`, or NEVER if after `latest`.

    The profile says: free[i] nodes from times[i] to times[i + 1]; the last segment has no end.
    """
    i = 0
    while i < count:
        if free[i] < nodes:
            i += 1
            continue
        begin = times[i]
        if begin > latest:
            return NEVER
        j = i + 1
        while j < count and times[j] < begin + duration and free[j] >= nodes:
            j += 1
        if j == count or times[j] >= begin + duration:
            return int(begin)
        i = j + 1
    return NEVER


def reserve(times: Ints, free: Ints, count: int, nodes: int, duration: int, begin: int) -> int:
    """Take `nodes` out of the profile from `begin` for `duration`; the new number of segments."""
    first = 0
    while first < count and times[first] < begin:
        first += 1
    if first == count or times[first] != begin:
        for k in range(count, first, -1):
            times[k] = times[k - 1]
            free[k] = free[k - 1]
        times[first] = begin
        free[first] = free[first - 1]
        count += 1
    end = begin + duration
    last = first
    while last < count and times[last] < end:
        free[last] -= nodes
        last += 1
    if last == count or times[last] != end:
        for k in range(count, last, -1):
            times[k] = times[k - 1]
            free[k] = free[k - 1]
        times[last] = end
        free[last] = free[last - 1] + nodes
        count += 1
    return count


def free_profile(
    times: Ints, free: Ints, now: int, free_now: int, ends: Ints, nodes: Ints, running: int
) -> int:
    """Fill the profile from the predicted ends of what runs; the number of segments."""
    times[0] = now
    free[0] = free_now
    count = 1
    for k in rising(ends[:running]):
        end = ends[k]
        if end <= times[count - 1]:
            free[count - 1] += nodes[k]
        else:
            times[count] = end
            free[count] = free[count - 1] + nodes[k]
            count += 1
    return count


def planned_start(
    times: Ints,
    free: Ints,
    now: int,
    free_now: int,
    run_ends: Ints,
    run_nodes: Ints,
    running: int,
    wait_nodes: Ints,
    wait_durations: Ints,
    waiting: int,
    nodes: int,
    duration: int,
) -> int:
    """When a job that ranks behind everything waiting would start, all durations being as given.

    `times` and `free` are scratch of at least running + 2 * waiting + 4 entries.
    """
    horizon = now + HORIZON_S
    count = free_profile(times, free, now, free_now, run_ends, run_nodes, running)
    for k in range(waiting):
        begin = earliest_slot(times, free, count, wait_nodes[k], wait_durations[k], horizon)
        if begin != NEVER:
            count = reserve(times, free, count, wait_nodes[k], wait_durations[k], begin)
    begin = earliest_slot(times, free, count, nodes, duration, horizon)
    return begin if begin != NEVER else horizon


HORIZON_S = 10 * 86_400
"""How far ahead a plan looks: longer waits are all the same to a chain."""


def limit_class(limit_s: int) -> int:
    """Jobs alike in their limit end alike: up to 1 h, 4 h, 12 h, 24 h, 47 h, longer."""
    if limit_s <= 3_600:
        return 0
    if limit_s <= 14_400:
        return 1
    if limit_s <= 43_200:
        return 2
    if limit_s <= 86_400:
        return 3
    if limit_s < 169_200:
        return 4
    return 5


LIMIT_CLASSES = 6


def sorted_shares(ring: Floats, known: int) -> Floats:
    """What a ring holds, in rising rank."""
    held = ring[: min(known, ring.shape[0])]
    return held[rising(held)]


def remaining_guess(shares: Floats, limit: int, elapsed: int, level: float) -> int:
    """Seconds a job has left, at the `level` quantile of how jobs like it ended.

    `shares` holds, in rising rank, the shares of their limits that earlier jobs used; only those
    that ran longer than this one already has can speak for it.
    """
    left = limit - elapsed
    if left <= LATE_S:
        return LATE_S
    done = elapsed / limit
    known = shares.shape[0]
    first = np.searchsorted(shares, done, side="right")
    if first == known:
        return left
    pick = first + int(level * (known - first))
    return max(int(shares[pick] * limit) - elapsed, LATE_S)


LATE_S = 60
"""What a job at or past its end is given: the limit is enforced by a slow periodic check."""

SAMPLES = 11
"""Futures drawn per look; a prime, so that every job walks all of them in a rank of its own."""

OWN_RECORD = 5
"""From how many ended jobs on a user's own record speaks for their next one."""


def sampled_left(
    out: Ints,
    limit: int,
    elapsed: int,
    user: int,
    since: int,
    user_share: Floats,
    user_known: Ints,
    classes: Floats,
    class_known: Ints,
) -> None:
    """What one job may have left, in each of SAMPLES futures: stratified, no random numbers.

    The rank in which a job walks its futures hangs on when it came (`since`) only: it is the same
    at every look, and jobs that came together, an array say, are long or short together.
    """
    row = limit_class(limit)
    if user_known[user] >= OWN_RECORD:
        shares = sorted_shares(user_share[user], user_known[user])
    else:
        shares = classes[row, : min(class_known[row], classes.shape[1])]
    stride = 1 + since % (SAMPLES - 1)
    offset = (since // (SAMPLES - 1)) % SAMPLES
    for m in range(SAMPLES):
        level = ((m * stride + offset) % SAMPLES + 0.5) / SAMPLES
        out[m] = remaining_guess(shares, limit, elapsed, level)


FEATURES = (
    "left_h",
    "size",
    "free",
    "queue_log",
    "queue_nodes",
    "queue_limit_work_h",
    "queue_likely_work_h",
    "running_limit_work_h",
    "running_likely_work_h",
    "oldest_wait_h",
    "mean_wait_so_far_h",
    "plan_by_limits_h",
    "plan_mean_h",
    "plan_p10_h",
    "plan_p25_h",
    "plan_p50_h",
    "plan_p75_h",
    "plan_p90_h",
    "recent_wait_mean_h",
    "recent_wait_p99_h",
    "recent_wait_like_h",
    "submitted_day",
    "submitted_6h",
    "hour_sin",
    "hour_cos",
    "weekend",
    "own_wait_h",
    "freed_by_end",
)
"""What a choice is made from, all known when it is made. Nodes are shares of the cluster, work is
hours of the whole cluster, so that what is learnt on one cluster says something about another."""


def chain_features(
    out: Floats,
    now: int,
    total: int,
    free_now: int,
    nodes: int,
    limit: int,
    ends_at: int,
    waited: int,
    own: int,
    run_nodes: Ints,
    run_limit: Ints,
    run_elapsed: Ints,
    run_user: Ints,
    wait_nodes: Ints,
    wait_limit: Ints,
    wait_age: Ints,
    wait_user: Ints,
    user_share: Floats,
    user_known: Ints,
    class_share: Floats,
    class_known: Ints,
    recent_waits: Floats,
    recent_nodes: Ints,
    submitted_day: float,
    submitted_6h: float,
    times: Ints,
    free: Ints,
) -> None:
    """Fill `out`, one number per name in FEATURES. Waiting jobs come in rank of priority.

    `own` is the predecessor's place among the running jobs, or NEVER once it has ended: it is the
    one job whose end is known.
    """
    running = run_nodes.shape[0]
    waiting = min(wait_nodes.shape[0], PLANNED)
    left = ends_at - now
    classes = np.empty_like(class_share)
    for row in range(LIMIT_CLASSES):
        known = min(class_known[row], class_share.shape[1])
        classes[row, :known] = sorted_shares(class_share[row], known)

    run_left = np.empty((running, SAMPLES), dtype=np.int64)
    run_limit_work = 0.0
    run_likely_work = 0.0
    for k in range(running):
        rest = max(run_limit[k] - run_elapsed[k], LATE_S)
        if k == own:
            run_left[k, :] = max(left, LATE_S)
        else:
            sampled_left(
                run_left[k],
                run_limit[k],
                run_elapsed[k],
                run_user[k],
                now - run_elapsed[k],
                user_share,
                user_known,
                classes,
                class_known,
            )
        run_limit_work += run_nodes[k] * rest
        run_likely_work += run_nodes[k] * np.mean(run_left[k])

    wait_left = np.empty((waiting, SAMPLES), dtype=np.int64)
    wait_limit_work = 0.0
    wait_likely_work = 0.0
    queue_nodes = 0
    for k in range(waiting):
        sampled_left(
            wait_left[k],
            wait_limit[k],
            0,
            wait_user[k],
            now - wait_age[k],
            user_share,
            user_known,
            classes,
            class_known,
        )
        wait_limit_work += wait_nodes[k] * wait_limit[k]
        wait_likely_work += wait_nodes[k] * np.mean(wait_left[k])
        queue_nodes += wait_nodes[k]

    starts = np.zeros(SAMPLES, dtype=np.float64)
    by_limits = 0.0
    if waiting > 0 or free_now < nodes:
        ends = np.empty(running, dtype=np.int64)
        for k in range(running):
            ends[k] = now + max(run_limit[k] - run_elapsed[k], LATE_S)
        begin = planned_start(
            times,
            free,
            now,
            free_now,
            ends,
            run_nodes,
            running,
            wait_nodes,
            wait_limit,
            waiting,
            nodes,
            limit,
        )
        by_limits = (begin - now) / 3600.0
        durations = np.empty(waiting, dtype=np.int64)
        for m in range(SAMPLES):
            for k in range(running):
                ends[k] = now + run_left[k, m]
            for k in range(waiting):
                durations[k] = wait_left[k, m]
            begin = planned_start(
                times,
                free,
                now,
                free_now,
                ends,
                run_nodes,
                running,
                wait_nodes,
                durations,
                waiting,
                nodes,
                limit,
            )
            starts[m] = (begin - now) / 3600.0
        starts = starts[rising(starts)]

    freed = float(free_now)
    for k in range(running):
        freed += run_nodes[k] * np.mean(run_left[k] <= left)

    recent = recent_waits.shape[0]
    ranked = recent_waits[rising(recent_waits)]
    like_sum = 0.0
    like_count = 0
    for k in range(recent):
        if recent_nodes[k] * 2 >= nodes:
            like_sum += recent_waits[k]
            like_count += 1

    whole = total * 3600.0
    hour = (now % 86_400) / 86_400.0 * 2.0 * np.pi
    # Day 0 of the epoch was a Thursday.
    weekday = (now // 86_400 + 3) % 7
    out[0] = left / 3600.0
    out[1] = nodes / total
    out[2] = free_now / total
    out[3] = np.log1p(wait_nodes.shape[0])
    out[4] = queue_nodes / total
    out[5] = wait_limit_work / whole
    out[6] = wait_likely_work / whole
    out[7] = run_limit_work / whole
    out[8] = run_likely_work / whole
    out[9] = np.max(wait_age) / 3600.0 if waiting > 0 else 0.0
    out[10] = np.mean(wait_age) / 3600.0 if waiting > 0 else 0.0
    out[11] = by_limits
    out[12] = np.mean(starts)
    out[13] = starts[SAMPLES // 10]
    out[14] = starts[SAMPLES // 4]
    out[15] = starts[SAMPLES // 2]
    out[16] = starts[3 * SAMPLES // 4]
    out[17] = starts[9 * SAMPLES // 10]
    out[18] = np.mean(recent_waits) if recent > 0 else 0.0
    out[19] = ranked[min(recent - 1, 99 * recent // 100)] if recent > 0 else 0.0
    out[20] = like_sum / like_count if like_count > 0 else out[18]
    out[21] = submitted_day / (24.0 * total)
    out[22] = submitted_6h / (6.0 * total)
    out[23] = np.sin(hour)
    out[24] = np.cos(hour)
    out[25] = 1.0 if weekday >= 5 else 0.0
    out[26] = waited / 3600.0
    out[27] = freed / total


PLANNED = 256
"""How many waiting jobs a plan takes in; a longer queue is cut at its low-priority end."""
