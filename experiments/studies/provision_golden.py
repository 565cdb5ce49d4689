"""What λDNN and spotDNN print, what their formulas give here, and what does not reproduce.

python -m experiments.studies.provision_golden
"""

from collections.abc import Iterator

from funcpipe.provision.lambdadnn import predict, search
from funcpipe.provision.spotdnn import predict as predict_spot
from funcpipe.provision.spotdnn import worker_bandwidth
from funcpipe.provision.spotdnn_search import Space, exhaustive_search, extended_search, window_search
from tests.provision.published import CNN_1D, LAMBDA, MOBILE_NET, RESNET_50, SPOT, spot_goal, spot_types

Row = tuple[str, str, str, str]


def verdict(printed: float, found: float, within: float) -> str:
    off = found / printed - 1
    return "reproduces" if abs(off) <= within else f"off by {off:+.1%}"


def lambda_times() -> Iterator[Row]:
    for functions, memory_mb, epochs, printed in (
        *((10, 1088, 5, 86.2), (7, 1344, 5, 97), (5, 1792, 5, 104)),
        *((8, 960, 3, 71), (8, 1472, 3, 47), (8, 1984, 3, 38), (8, 2496, 3, 32), (8, 3008, 3, 28)),
    ):
        found = predict(functions, memory_mb, 15_000 * epochs, CNN_1D, LAMBDA).seconds
        name = f"λDNN, 1DCNN, {functions} x {memory_mb} MB, {epochs} epochs: s"
        yield name, f"{printed:g}", f"{found:.1f}", verdict(printed, found, 0.005)
    for functions, printed in ((8, 490.0),):
        found = predict(functions, 2560, 50_000, RESNET_50, LAMBDA).seconds
        yield (
            f"λDNN, ResNet-50, {functions} x 2560 MB (figure: 478 to 503): s",
            "about 490",
            f"{found:.1f}",
            verdict(printed, found, 0.03),
        )


def lambda_bills() -> Iterator[Row]:
    for functions, memory_mb, seconds, printed in (
        *((8, 3008, 703.95, 29.40), (9, 2816, 528.96, 23.19), (8, 2560, 573.34, 20.36)),
    ):
        one = predict(functions, memory_mb, 50_000, RESNET_50, LAMBDA)
        found = 100 * one.usd(server=True) * seconds / one.seconds
        yield (
            f"λDNN, Table 3, {functions} x {memory_mb} MB, {seconds} s: cents",
            f"{printed}",
            f"{found:.2f}",
            verdict(printed, found, 0.0005),
        )


def lambda_plans() -> Iterator[Row]:
    cases = (
        ("MobileNet", MOBILE_NET, 300_000, {1200: (1728, 7)}),
        ("1DCNN", CNN_1D, 75_000, {90: (1088, 10), 150: (1344, 7), 210: (1792, 5)}),
        ("ResNet-50", RESNET_50, 50_000, {600: (2560, 8), 700: (2816, 6), 800: (2752, 6)}),
    )
    for name, work, samples, plans in cases:
        for deadline_s, printed in plans.items():
            for server in (False, True) if name == "MobileNet" else (False,):
                found = search(samples, deadline_s, work, LAMBDA, count_server=server)
                plan = None if found is None else (found.memory_mb, found.functions)
                how = ", with the server's price" if server else ""
                same = "reproduces" if plan == printed else "does not"
                yield f"λDNN, {name}, {deadline_s} s{how}: MB, functions", str(printed), str(plan), same


def spot_times() -> Iterator[Row]:
    for counts, loss, printed in (
        *(((0, 0, 5, 3, 0), 0.8, 2549.02), ((0, 2, 5, 2, 0), 0.8, 2597.34), ((0, 0, 4, 3, 0), 0.8, 2710.85)),
    ):
        found = predict_spot(counts, spot_types(), SPOT, spot_goal(loss)).seconds
        yield f"spotDNN, Table I, {list(counts)}: s", f"{printed}", f"{found:.2f}", verdict(printed, found, 0.0005)
    for loss, read in ((2.4, 2378), (1.9, 3540), (1.4, 5993), (0.9, 14580)):
        one = predict_spot((0, 4, 0, 4, 0), spot_types(), SPOT, spot_goal(loss))
        yield (
            f"spotDNN, figure 6a, loss {loss}: iterations",
            f"about {read}",
            f"{one.steps:.0f}",
            verdict(read, one.steps, 0.01),
        )
    yield (
        "spotDNN, MB/s of one of 9, 10, 13 workers",
        "-",
        ", ".join(f"{worker_bandwidth(n, SPOT):.1f}" for n in (9, 10, 13)),
        "not printed",
    )


def spot_plans() -> Iterator[Row]:
    for loss, deadline_s, printed, srifty in (
        (0.9, 1900, (2, 0, 2, 0, 0), (2, 0, 2, 0, 0)),
        (0.8, 2400, (2, 0, 4, 0, 0), (2, 0, 4, 0, 0)),
        (0.7, 3700, (2, 1, 4, 0, 0), (2, 1, 3, 0, 0)),
    ):
        for name, run, wanted in (
            ("window", window_search, printed),
            ("all combinations", exhaustive_search, srifty),
            ("ours", extended_search, srifty),
        ):
            found = run(Space(spot_types(), SPOT, spot_goal(loss, deadline_s)))
            assert found is not None
            same = "reproduces" if found.counts == wanted else f"does not: {found.seconds:.1f} s, ${found.usd:.2f}"
            yield (
                f"spotDNN, Table V, loss {loss}, {deadline_s} s, {name}",
                str(list(wanted)),
                str(list(found.counts)),
                same,
            )


def main() -> None:
    rows = [*lambda_times(), *lambda_bills(), *lambda_plans(), *spot_times(), *spot_plans()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print("  ".join(name.ljust(width) for name, width in zip(("value", "printed", "here"), widths, strict=True)))
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3])
    print("\nNot to be checked: Inception-v3, VGG-19, EsperBERTo (no coefficients published); ESPCN; all of Cynthia.")


if __name__ == "__main__":
    main()
