"""A plan as a bar chart: tokens where memory was given, else bytes per token."""

from pathlib import Path

from launcher.flags import UsageError
from launcher.plan_table import label


def draw(plan, path):
    """Writes the chart to ``path``, whose ending names the format.

    Raises: UsageError when the path has no ending, matplotlib is missing, or the file cannot be written.
    """
    if not Path(path).suffix:  # matplotlib would choose one, and write beside what was named
        raise UsageError(f"--plot {path!r}: a file with an ending, as out.png, is needed")
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            f"--plot {path}: matplotlib is not installed; pip install 'sglang-fp4kv[plot]'"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    counted = plan.rows[0].tokens is not None
    names = [label(row) for row in plan.rows]
    values = [row.tokens if counted else row.bytes_per_token for row in plan.rows]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.45 * len(names)), layout="constrained")
    bars = axes.barh(
        names, values, color=["tab:green" if row.kv == "nvfp4" else "tab:gray" for row in plan.rows]
    )
    axes.bar_label(bars, [f"{value:,}" for value in values], padding=3)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("tokens that fit on one GPU" if counted else "bytes per token on one GPU")
    axes.set_title(plan.model)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: it cannot be written ({error})") from None
    finally:
        pyplot.close(figure)
