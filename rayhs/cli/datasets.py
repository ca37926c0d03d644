"""The verbs that work on a dataset in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from rayhs.cli.arguments import Endpoint, Json, Profile, Region, Uri, open_uri
from rayhs.config import StorageConfig

verbs = typer.Typer()


@verbs.command()
def status(
    uri: Uri, json: Json = False, endpoint: Endpoint = None, region: Region = None, profile: Profile = None
) -> None:
    """How far a dataset is, finished or not."""
    from rayhs import report
    from rayhs.cli.output import print_json, print_status

    result = report.status(open_uri(uri, endpoint, region, profile))
    if json:
        print_json(result.to_dict())
    else:
        print_status(result)


@verbs.command()
def failures(
    uri: Uri, json: Json = False, endpoint: Endpoint = None, region: Region = None, profile: Profile = None
) -> None:
    """The samples without states, with their reasons."""
    from rayhs import report
    from rayhs.cli.output import print_failures, print_json

    store = open_uri(uri, endpoint, region, profile)
    rows = report.failures(store)
    if json:
        print_json({"uri": store.uri, "failures": list(rows)})
    else:
        print_failures(rows)


@verbs.command()
def verify(
    uri: Uri,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Recompute samples with this transformers model and compare.")
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Compare with the dataset's own model; what of the error is the dtype's.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to compare with the reference.")] = 8,
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Read every object and check it; exits with 4 where something is damaged or missing."""
    from rayhs.cli.output import print_json, print_verify
    from rayhs.cli.progress import VerifyProgress
    from rayhs.verify import verify as run_verify

    store = open_uri(uri, endpoint, region, profile)
    with VerifyProgress() as progress:
        report = run_verify(store, reference=reference, quality=quality, samples=samples, on_progress=progress)
    if json:
        print_json(report.to_dict())
    else:
        print_verify(report)
    raise typer.Exit(report.exit_code)


@verbs.command()
def export(
    uri: Annotated[str | None, typer.Argument(metavar="URI", help="The dataset.", show_default=False)] = None,
    output: Annotated[str | None, typer.Argument(metavar="OUT", help="An empty folder or s3:// prefix.")] = None,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="Who will read it: see --list.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the exporter, see --list.")
    ] = None,
    explain: Annotated[bool, typer.Option("--list", help="Explain all exporters, or the one of --to.")] = False,
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Write a dataset as a trainer reads it. Run the same command again to go on with one that was interrupted."""
    from rayhs.cli.exporting import list_exporters, run_export

    storage = StorageConfig(endpoint=endpoint, region=region, profile=profile)
    if explain:
        list_exporters(to, json)
    else:
        run_export(uri, output, to, option or [], storage, json)


@verbs.command("import")
def import_(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The local folder of the dump.", show_default=False)],
    output: Annotated[str, typer.Argument(metavar="OUT", help="A folder or s3://bucket/prefix.", show_default=False)],
    kind: Annotated[str, typer.Option("--from", metavar="KIND", help="speculators or vllm.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A hub id or folder: the model the states are of.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="All layers in the files, ascending: 2,15,27,30.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="shards.*, revision, ... as in a run file."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="First read and check all that is there; make what is damaged anew.")
    ] = False,
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Pack a dump of hidden states, a file a sample, into a dataset. Run the same command again to go on.

    --from speculators: a save_to_disk folder with hidden_states/hs_<row>.safetensors; its last layer is n.
    --from vllm: the files of ExampleHiddenStatesConnector, in DIR and below; they have no loss mask.

    Layer ids count as vLLM's: k is after k decoder layers, n the last, before the final norm. Model and layers may
    be left out where rayhs export wrote the files. A row whose file is missing, being written, damaged, of other
    tokens or not finite becomes a failed sample with a reason. States are stored in the files' dtype, or in that of
    --set shards.dtype=...; those in float8 are read as bfloat16.
    """
    from rayhs.cli.importing import run_import

    storage = StorageConfig(endpoint=endpoint, region=region, profile=profile)
    raise typer.Exit(run_import(folder, output, kind, model, layers, option or [], storage, repair, json))


@verbs.command()
def inspect(
    uri: Uri,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the figures with plots as one HTML page.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=0, help="Read the states of so many samples, 0 for all.", show_default="1000, at most 4 GiB"),
    ] = None,
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Norms and massive activations by layer, lengths, duplicates, loss masks."""
    from rayhs.cli.inspecting import run_inspect

    run_inspect(uri, html, samples, StorageConfig(endpoint=endpoint, region=region, profile=profile), json)


@verbs.command()
def gc(
    uri: Uri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Such as 30m, 6h, 2d. Below 6h no run into URI may be going on.")
    ] = "6h",
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Remove what is no part of the dataset: objects of attempts that lost, unfinished uploads."""
    from rayhs.cli.output import print_gc, print_json
    from rayhs.gc import collect, parse_age

    report = collect(open_uri(uri, endpoint, region, profile), older_than=parse_age(older_than), dry_run=dry_run)
    if json:
        print_json(report.to_dict())
    else:
        print_gc(report)


@verbs.command()
def show(
    uri: Uri,
    sample: Annotated[str | None, typer.Argument(help="A sample id or position; default the first good one.")] = None,
    json: Json = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """The identity of a dataset and one sample of it."""
    from rayhs import report
    from rayhs.cli.output import print_json, print_show

    result = report.show(open_uri(uri, endpoint, region, profile), sample)
    if json:
        print_json(result)
    else:
        print_show(result)
