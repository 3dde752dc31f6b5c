"""How close is a training step to the dense tower alone, and how much of it is communication?

    python benchmarks/train_step.py                                    # 2 ranks, B=4096, D=16, MLP=32
    python benchmarks/train_step.py --mlp 32 256,128 --batch 256 4096 16384 --depth 0 2

For each batch size and tower, in turn within the same processes: the step on the workload that other trainers are
compared on (`hvd-ctr bench train-step`), at each depth of the pipeline; the ceiling, which is the same tower through
the same train step on ready-made rows (B, 13 + 26 D), with their gradients, the same allreduce and the same optimizer;
the step with a plain first layer on expanded rows in place of the FactorizedDense, which is why a step may be faster
than the ceiling; and the local step, in which every collective is answered at once by what this rank would have sent.
Share of the ceiling and ms above it are those of the faster depth.

Exposed communication is (step - local step) / step. In the local step a rank keeps keys, rows and gradients, and sums
nothing: it asks itself for all U keys of its batch. Its own work differs from the real step's in two ways: it need not
part keys by owner, and no key is asked for by two ranks, so it makes and updates more rows per step. The second weighs
more, so exposed communication is a little larger than what is printed; the distinct keys per step of both are printed
too.

All batches are trained once before the first round, so timed steps find their rows, as all but the first minutes of a
job do. `--first-pass` times the first steps instead, which create most of their rows; how long the system takes to give
memory that nobody has touched is then a part of the step, and differs by more than a millisecond from job to job.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from hvd_ctr import comm as comms
from hvd_ctr.bench import measure
from hvd_ctr.bench.measure import Must, median
from hvd_ctr.bench.train_step import Workload, dense_steps, embedding_steps


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[4096], help="samples per rank and step")
    parser.add_argument("--mlp", nargs="+", default=["32"], help="widths of the hidden layers, one tower per word")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 2], help="depths of the pipeline")
    parser.add_argument("--scale", type=float, default=0.25, help="of the tables' cardinalities")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round and variant")
    parser.add_argument("--first-pass", action="store_true", help="time steps that create rows")
    parser.add_argument("--warm", type=int, default=15, help="steps before the first round")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    return parser.parse_args()


# ---- on every rank ----


def measure_one(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By variant: ms per step of each round, and distinct keys per step at an owner."""
    rounds, steps = settings["rounds"], settings["steps"]
    workload = Workload(**{**settings["workload"], "mlp": tuple(settings["workload"]["mlp"])})
    steppers, variants = {}, {}
    for depth in settings["depths"]:
        for name, by in (("step", None), ("local", comms.LocalComm())):
            untimed = depth + 1  # fetched while other variants ran
            made = dataclasses.replace(workload, steps=rounds * (steps + untimed))
            stepper = embedding_steps(made, depth, by)
            variants[f"{name}, depth {depth}"] = stepper.timed(steps, untimed)
            steppers[f"{name}, depth {depth}"] = stepper
    made = dataclasses.replace(workload, steps=rounds * (steps + 1), factorized=False)
    steppers["plain"] = embedding_steps(made, 0)
    variants["plain first layer, depth 0"] = steppers["plain"].timed(steps, 1)
    ceiling = dense_steps(workload)
    variants["dense only"] = ceiling.timed(steps, 1)
    for stepper in [*steppers.values(), ceiling]:
        stepper.run(workload.warm)
    for stepper in () if settings["first_pass"] else steppers.values():
        stepper.run(rounds * (steps + max(settings["depths"]) + 1))  # at least all of its batches
    found = measure.interleaved(variants, rounds)
    steppers.pop("plain").close()
    keys = {}
    for name, stepper in steppers.items():
        stepper.close()
        totals = stepper.model.embeddings[0].cache_stats()["total"]
        keys[name] = totals["unique"] // totals["steps"]
    return {"ms_per_step": found, "keys_per_step": keys}


# ---- in front ----


def summary(workload: Workload, ranks: int, depths: list[int], figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of one workload, with what must hold of them (for the workloads that have a bound)."""
    found = figures["ms_per_step"]
    step = {depth: median(found[f"step, depth {depth}"]) for depth in depths}
    best = min(step, key=lambda depth: step[depth])
    ceiling, local = median(found["dense only"]), median(found[f"local, depth {best}"])
    share, above, exposed = ceiling / step[best], step[best] - ceiling, (step[best] - local) / step[best]
    plain = median(found["plain first layer, depth 0"])
    small, bounds = workload.mlp == (32,), []
    if ranks == 2 and workload.dim == 16 and workload.batch in (4096, 16384):
        if small:
            bounds = [Must("ms above the ceiling", above, 8 if workload.batch == 4096 else 28)]
        elif workload.mlp == (256, 128):
            bounds = [Must("share of the ceiling", share, 0.85 if workload.batch == 4096 else 0.9, at_least=True)]
            bounds.append(Must("exposed communication", exposed, 0.25))
    return {
        "batch": workload.batch,
        "mlp": list(workload.mlp),
        "faster_depth": best,
        "samples_per_second": 1e3 * workload.batch * ranks / step[best],
        "share_of_ceiling": share,
        "ms_above_ceiling": above,
        "plain_first_layer": {"share_of_ceiling": ceiling / plain, "ms_above_ceiling": plain - ceiling},
        "exposed_communication": exposed,
        "musts": [str(bound) for bound in bounds],
        **figures,
    }


def show(workload: Workload, ranks: int, figures: dict[str, Any]) -> None:
    rows = [
        [
            name,
            measure.with_range(times),
            f"{workload.batch * ranks / median(times):,.0f}k",
            figures["keys_per_step"].get(name, ""),
        ]
        for name, times in figures["ms_per_step"].items()
    ]
    print(f"\n{ranks} ranks, B={workload.batch}, D={workload.dim}, MLP={','.join(map(str, workload.mlp))}")
    print(measure.table(["variant", "ms per step (range of the rounds)", "samples/s", "distinct keys"], rows))
    print(
        f"depth {figures['faster_depth']}: {figures['share_of_ceiling']:.3f} of the ceiling, "
        f"{figures['ms_above_ceiling']:.2f} ms above it; {100 * figures['exposed_communication']:.0f} % of the step "
        "is exposed communication"
    )
    share, above = (figures["plain_first_layer"][name] for name in ("share_of_ceiling", "ms_above_ceiling"))
    print(f"with a plain first layer: {share:.3f} of the ceiling, {above:.2f} ms above it")
    for line in figures["musts"]:
        print(line)


def main() -> None:
    options = parse()
    found = []
    for mlp in options.mlp:
        for batch in options.batch:
            workload = Workload(
                options.scale, options.dim, batch, 0, options.warm, tuple(int(width) for width in mlp.split(","))
            )
            settings = {
                "workload": dataclasses.asdict(workload),
                "rounds": options.rounds,
                "steps": options.steps,
                "depths": options.depth,
                "first_pass": options.first_pass,
            }
            figures = measure.launch(__file__, options.ranks, settings)
            found.append(summary(workload, options.ranks, options.depth, figures))
            show(workload, options.ranks, found[-1])
    measure.write_json(options.json, {"ranks": options.ranks, "workloads": found})


if __name__ == "__main__":
    measure.serve(measure_one) or main()
