"""Ways a Parquet file of a dataset can lie."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from rayhs import layout
from rayhs.layout import ShardId
from tests.builders import Builder
from tests.parquet_surgery import I32, I64, LIST, STRUCT, PageChange, Struct, chunks_of, operate, varint

Damage = Callable[[Builder], object]
MOST = 2**31 - 1
INDEX, SAMPLES = layout.index_name(0), layout.samples_name(0)
SHARD = layout.object_name(ShardId(0, 0), "0123456789abcdef", "parquet")


def rewritten(name: str, **changes: Any) -> Damage:
    return lambda built: _put(built, name, operate((built.folder / name).read_bytes(), **changes))


def _put(built: Builder, name: str, data: bytes) -> None:
    built.put(name, data)
    if name == SHARD:  # as a commit record would have it, so that verify looks inside
        seal = {"object_bytes": len(data), "object_checksum": xxhash.xxh3_128_hexdigest(data)}
        built.edit_record(layout.commit_name(ShardId(0, 0)), lambda c: c.update(seal))


def page(column: str, change: Callable[[Struct], object], kind: int = 0) -> PageChange:
    """Change the headers of one column's pages of one kind (0 data, 2 dictionary)."""

    def changed(name: str, header: Struct, body: bytes) -> bytes:
        if name == column and header[1][1] == kind:
            change(header)
        return body

    return changed


def set_in(struct_field: int, field: int, value: int) -> Callable[[Struct], object]:
    return lambda header: header[struct_field][1].update({field: (I32, value)})


def values_of_chunks(column: str, values: int) -> Callable[[Struct], None]:
    def changed(footer: Struct) -> None:
        for chunk in chunks_of(footer):
            if chunk[3][1][1][0].decode() == column:
                chunk[5] = (I64, values)

    return changed


def endless_list(column: str, values: int, item: bytes = b"") -> dict[str, Any]:
    """A list of ``values`` equal elements in a few bytes: every level and index is one run."""

    def changed(name: str, header: Struct, body: bytes) -> bytes:
        if name != column or header[1][1] != 0:
            return body
        runs = b""
        for first, then, deepest in ((0, 1, 1), (1, 1, 1)):  # repetition, then definition levels
            run = varint(1 << 1) + bytes([first]) + varint((values - 1) << 1) + bytes([then * deepest])
            runs += struct.pack("<I", len(run)) + run
        changed_body = runs + (item or b"\x01" + varint(values << 1) + b"\0")
        header[2] = (I32, len(changed_body))
        header[5][1][1] = (I32, values)
        return changed_body

    return {"page": changed, "footer": values_of_chunks(column, values)}


def footer(change: Callable[[Struct], object]) -> dict[str, Any]:
    return {"footer": change}


def truncated(name: str, keep: int) -> Damage:
    return lambda built: _put(built, name, (built.folder / name).read_bytes()[:keep])


def tail(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda built: _put(built, name, change((built.folder / name).read_bytes()))


def nested(depth: int) -> Callable[[Struct], None]:
    """The schema gets ``depth`` groups, each inside the one before."""

    def changed(meta: Struct) -> None:
        inner, elements = meta[2][1]
        group = {3: (I32, 0), 4: (8, b"g"), 5: (I32, 1)}
        leaf = {1: (I32, 1), 3: (I32, 0), 4: (8, b"leaf")}
        root = {**elements[0], 5: (I32, elements[0][5][1] + 1)}
        meta[2] = (LIST, (inner, [root, *elements[1:], *[group] * depth, leaf]))

    return changed


def children(count: int) -> Callable[[Struct], None]:
    return lambda meta: meta[2][1][1][0].update({5: (I32, count)})


def each_chunk(field: int, value: int, also: int | None = None) -> Callable[[Struct], None]:
    def changed(meta: Struct) -> None:
        for chunk in chunks_of(meta):
            chunk.update({n: (I64, value) for n in (field, also) if n is not None})

    return changed


def rows_of_groups(rows: int) -> Callable[[Struct], None]:
    def changed(meta: Struct) -> None:
        meta[3] = (I64, rows)
        for group in meta[4][1][1]:
            group[3] = (I64, rows)

    return changed


def table(name: str, schema: pa.Schema, columns: dict[str, Any], **options: Any) -> Damage:
    """A file of other columns than its schema has, or stored in another way."""

    def damage(built: Builder) -> None:
        sink = io.BytesIO()
        whole = pq.read_table(built.folder / name)
        for column, values in columns.items():
            whole = whole.set_column(whole.column_names.index(column), column, values(len(whole)))
        pq.write_table(whole, sink, store_schema=False, **options)
        _put(built, name, sink.getvalue())

    return damage


def long_text_often(built: Builder) -> None:
    """A text of a megabyte that 20000 rows name: 20 GB once unpacked, a megabyte stored."""
    rows = 20_000
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 2**20])
    columns = {
        "index": pa.array(range(rows)),
        "sample_id": pa.array([str(i) for i in range(rows)]),
        "shard": pa.nulls(rows, pa.string()),
        "token_start": pa.array([0] * rows),
        "num_tokens": pa.array([0] * rows),
        "status": pa.array(["failed"] * rows),
        "reason": text,
    }
    sink = io.BytesIO()
    required = [f for f in layout.INDEX_SCHEMA if not f.nullable]
    fields = [pa.field(n, c.type, n not in {f.name for f in required}) for n, c in columns.items()]
    pq.write_table(pa.table(list(columns.values()), pa.schema(fields)), sink, store_schema=False)
    built.put(INDEX, sink.getvalue())
    built.edit_record(
        layout.DATASET,
        lambda d: d["plan"]["files"].__setitem__(0, {"rows": rows, "rejected": 0, "shard_tokens": [1]}),
    )


def packed_text(built: Builder) -> None:
    """Texts of 32 MiB, each packed into a few kilobytes."""
    texts = [chr(97 + i) * 2**25 for i in range(3)]
    table(
        INDEX, layout.INDEX_SCHEMA, {"reason": lambda n: pa.array(texts[:n])}, compression="zstd", use_dictionary=False
    )(built)


def endless_tokens(built: Builder) -> None:
    values = 2**30
    uncompressed = io.BytesIO()
    pq.write_table(pq.read_table(built.folder / SAMPLES), uncompressed, compression="none")
    built.put(SAMPLES, operate(uncompressed.getvalue(), **endless_list("token_ids", values)))
    built.edit_record(layout.DATASET, lambda d: d["plan"]["files"][0].update(shard_tokens=[values]))


def everywhere(name: str, dictionary: str, data: str) -> dict[str, Damage]:
    """Lies that any of the files can tell: ``data`` is a column, ``dictionary`` one stored as dictionary."""
    cases: dict[str, Damage] = {
        "page of 2 GiB": rewritten(name, page=page(data, lambda h: h.update({2: (I32, MOST)}))),
        "page of less than nothing": rewritten(name, page=page(data, lambda h: h.update({2: (I32, -1)}))),
        "page longer than its chunk": rewritten(name, page=page(data, lambda h: h.update({3: (I32, MOST)}))),
        "page of -1 bytes": rewritten(name, page=page(data, lambda h: h.update({3: (I32, -1)}))),
        "page of 2^31 values": rewritten(name, page=page(data, set_in(5, 1, MOST))),
        "page and chunk of 2^31 values": rewritten(
            name, page=page(data, set_in(5, 1, MOST)), footer=values_of_chunks(data, MOST)
        ),
        "page of -1 values": rewritten(name, page=page(data, set_in(5, 1, -1))),
        "page of an unknown encoding": rewritten(name, page=page(data, set_in(5, 2, 7))),
        "page of an unknown kind": rewritten(name, page=page(data, lambda h: h.update({1: (I32, 9)}))),
        "page without a header": rewritten(name, page=page(data, lambda h: h.pop(5))),
        "chunk elsewhere": rewritten(name, **footer(each_chunk(9, 4))),
        "chunk of 2^62 bytes": rewritten(name, **footer(each_chunk(7, 2**62))),
        "chunk at 2^63": rewritten(name, **footer(each_chunk(9, 2**63 - 1, also=11))),
        "chunk of a codec of no kind": rewritten(name, **footer(each_chunk(4, 77))),
        "2^62 rows": rewritten(name, **footer(rows_of_groups(2**62))),
        "-1 rows": rewritten(name, **footer(rows_of_groups(-1))),
        "schema nested": rewritten(name, **footer(nested(20_000))),
        "schema of 2^31 columns": rewritten(name, **footer(children(MOST))),
        "schema of -1 columns": rewritten(name, **footer(children(-1))),
        "no schema": rewritten(name, **footer(lambda meta: meta.update({2: (LIST, (STRUCT, []))}))),
        "footer of 4 GiB": tail(name, lambda d: d[:-8] + b"\xff\xff\xff\xffPAR1"),
        "footer of nothing": tail(name, lambda d: d[:-8] + b"\0\0\0\0PAR1"),
        "empty": truncated(name, 0),
        "magic alone": truncated(name, 4),
        "cut": truncated(name, -1),
        "cut in half": tail(name, lambda d: d[: len(d) // 2]),
        "footer cut": tail(name, lambda d: d[:-200] + d[-8:]),
    }
    if dictionary:
        cases |= {
            "dictionary of 2^31": rewritten(name, page=page(dictionary, set_in(7, 1, MOST), kind=2)),
            "dictionary of -1": rewritten(name, page=page(dictionary, set_in(7, 1, -1), kind=2)),
            "dictionary of none": rewritten(name, page=page(dictionary, set_in(7, 1, 0), kind=2)),
            "dictionary of 2 GiB": rewritten(name, page=page(dictionary, lambda h: h.update({2: (I32, MOST)}), kind=2)),
        }
    return cases


INDEX_CASES: dict[str, Damage] = {
    **everywhere(INDEX, "sample_id", "token_start"),
    "text of 2 GiB": long_text_often,
    "packed text": packed_text,
    "column of another type": table(INDEX, layout.INDEX_SCHEMA, {"shard": lambda n: pa.array([b"x"] * n)}),
    "column of lists": table(INDEX, layout.INDEX_SCHEMA, {"shard": lambda n: pa.array([["x"]] * n)}),
    "column twice": lambda built: _twice(built),
}
SAMPLES_CASES: dict[str, Damage] = {
    **everywhere(SAMPLES, "sample_id", "index"),
    "endless token ids": endless_tokens,
    "nested columns": table(SAMPLES, layout.SAMPLES_SCHEMA, {"token_ids": lambda n: pa.array([[[1]]] * n)}),
}
SHARD_CASES: dict[str, Damage] = {
    **everywhere(SHARD, "", "token_ids"),
    "endless token ids": rewritten(SHARD, **endless_list("token_ids", 2**30, item=b"\0\0\0\0")),
    "endless mask": rewritten(SHARD, **endless_list("loss_mask", 2**30, item=b"\0\0\0\0")),
}


def _twice(built: Builder) -> None:
    whole = pq.read_table(built.folder / INDEX)
    sink = io.BytesIO()
    pq.write_table(whole.append_column("shard", whole["shard"]), sink)
    built.put(INDEX, sink.getvalue())
