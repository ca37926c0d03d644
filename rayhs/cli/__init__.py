"""The command line. Results go to standard output, progress and errors to standard error.

Exit codes: see `rayhs.errors`. What a verb needs is imported when it runs, so that help is quick and
reading needs neither Ray, vLLM nor torch.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rayhs import __version__, log
from rayhs.cli.arguments import Into, Json, Override, RunFile
from rayhs.cli.datasets import verbs
from rayhs.cli.terminable import terminable
from rayhs.errors import EXIT_INTERRUPTED, ConfigError, RayhsError


class _Group(TyperGroup):
    """Turns errors meant for people into one line and an exit code; lets all others show."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RayhsError as error:
            if os.environ.get("RAYHS_LOG", "").upper() == "DEBUG":
                raise
            typer.echo(f"rayhs: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            goes_on = ctx.invoked_subcommand in ("extract", "plan", "demo", "export", "import")
            typer.echo("rayhs: interrupted" + "; run the same command again to go on" * goes_on, err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Entry point of the ``rayhs`` command."""
    try:
        app(prog_name="rayhs")
    finally:
        # All is said and done; Ray's end takes a moment, and must not turn the exit code into another.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rayhs {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Prompts in, verified hidden states in an object store out.

    Exit codes: 0 done; 1 failed; 2 usage or config; 3 finished, some samples failed or were
    rejected; 4 verify found damage; 130 interrupted.
    """
    log.configure()


@app.command()
def extract(
    run: RunFile,
    override: Override = None,
    into: Into = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="First read and check all that is there; make what is damaged anew.")
    ] = False,
    json: Json = False,
) -> None:
    """Plan if needed, extract what is not there yet, write index and summary."""
    from rayhs.cli.output import print_json, print_run, results_apart

    config = _run_config(run, override, into)
    with results_apart() as out:
        from rayhs.cli.progress import RunProgress

        with RunProgress() as shown, terminable(shown) as progress:
            from rayhs.pipeline import run_extract

            result = run_extract(config, progress, repair)
        if json:
            totals = result.summary.model_dump(exclude={"index_checksums"})
            print_json({"uri": result.uri, "exit_code": result.exit_code, **totals}, out)
        else:
            print_run(result, out)
    raise typer.Exit(result.exit_code)


@app.command()
def plan(run: RunFile, override: Override = None, into: Into = None, json: Json = False) -> None:
    """Tokenise, and say exactly what extracting will take; needs no GPU."""
    from dataclasses import asdict

    from rayhs.cli.output import print_json, print_plan, results_apart

    config = _run_config(run, override, into)
    with results_apart() as out:
        from rayhs.cli.progress import RunProgress

        with RunProgress() as shown, terminable(shown) as progress:
            from rayhs.pipeline import run_plan

            result = run_plan(config, progress)
        if json:
            print_json(asdict(result), out)
        else:
            print_plan(result, out)


def _run_config(run: Path, override: list[str] | None, into: str | None) -> Any:
    from rayhs.config import load_config

    config = load_config(run, override or ())
    return config if into is None else config.model_copy(update={"output": into})


@app.command()
def bench(
    run: RunFile,
    override: Override = None,
    samples: Annotated[int | None, typer.Option(min=1, help="How many random prompts.", show_default="512")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Their lengths in tokens.", show_default="512:3584, or what fits"),
    ] = None,
    own_prompts: Annotated[bool, typer.Option("--own-prompts", help="All prompts of the run file instead.")] = False,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="stock", help="Measure vLLM's example connector too.")
    ] = None,
    plain: Annotated[bool, typer.Option(help="Measure plain vLLM.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 1,
    json: Json = False,
) -> None:
    """Speed of extraction beside plain prefill, on this cluster and model; and what holds it up.

    Random prompts need no data and no weights (engine.vllm.load_format: dummy). What is stored goes
    beside the run file's output, and is removed again.
    """
    from rayhs.cli.output import print_bench, print_json, results_apart

    config = _run_config(run, override, None)
    with results_apart() as out:
        from rayhs.bench import Workload, parse_lengths, run_bench
        from rayhs.cli.progress import RunProgress

        if any(name != "stock" for name in peer or ()):
            raise ConfigError(f"--peer {' '.join(peer or ())}: the only other connector that can be measured is stock")
        if own_prompts and (samples or lengths):
            raise ConfigError("--own-prompts takes all prompts of the run file; leave --samples and --lengths out")
        workload = None if own_prompts else Workload(samples or 512, *(parse_lengths(lengths) if lengths else ()))
        with RunProgress() as shown, terminable(shown) as progress:
            report = run_bench(config, workload, progress, rounds=rounds, plain=plain, stock=bool(peer))
        if json:
            print_json(report.to_dict(), out)
        else:
            print_bench(report, out)


@app.command()
def demo(
    output: Annotated[str, typer.Option(metavar="URI", help="Where the dataset goes.")] = "demo-output",
    documents: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 48,
) -> None:
    """Extract a small model's states on this machine, verify them and show one sample."""
    from rayhs import report
    from rayhs.cli.output import print_run, print_show, print_verify, results_apart
    from rayhs.cli.progress import RunProgress, VerifyProgress
    from rayhs.store import open_store

    with results_apart() as out:
        with RunProgress() as shown, terminable(shown) as progress:
            from rayhs.demo import run_demo

            result = run_demo(output, documents, progress)
        print_run(result, out)
        store = open_store(result.uri)
        model = report.show(store)["identity"]["model"]
        from rayhs.verify import verify as run_verify

        with VerifyProgress() as checking:
            checked = run_verify(store, reference=model, on_progress=checking)
        print_verify(checked, out)
        print_show(report.show(store), out)
    raise typer.Exit(result.exit_code or checked.exit_code)


app.add_typer(verbs)
