"""Tokens/s of a whole run over tokens/s of plain vLLM on the same prompts and settings, on the CPU.

    python tests/benchmarks/cpu_extract.py            # 3 rounds, turn by turn; prints JSON

Plain is `LLM.generate(max_tokens=1)` without extraction, in a process of its own, after a warm-up
prompt. Ours is the real pipeline on a local Ray into a local folder, from the first shard begun to
the last commit record. Start times are reported apart.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rayhs.demo import cache_folder, demo_config, prepare_demo

DOCUMENTS, ROUNDS = 72, 3
PLAIN = """
import json, os, sys, time
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
def main():
    from vllm import LLM, SamplingParams
    prompts = [{"prompt_token_ids": ids} for ids in json.load(open(sys.argv[2]))]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    started = time.perf_counter()
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True,
              disable_log_stats=True)
    up = time.perf_counter()
    llm.generate(prompts[:1], sampling, use_tqdm=False)
    warm = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - warm
    print("RESULT", json.dumps({"start_s": up - started, "seconds": seconds}))
if __name__ == "__main__":
    main()
"""
OURS = """
import json, sys, time
def main():
    from rayhs.config import parse_config
    from rayhs.pipeline import run_extract
    times = {}
    started = time.perf_counter()
    def seen(progress):
        times.setdefault(progress.phase, time.perf_counter() - started)
    result = run_extract(parse_config(json.loads(sys.argv[1])), seen)
    out = {"first_commit_s": times["extracting"], "planned_s": times["starting"], "tokens": result.summary.tokens}
    print("RESULT", json.dumps({**out, "tokens_per_second": result.summary.tokens_per_second}))
if __name__ == "__main__":
    main()
"""


def run(code: str, *arguments: str) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        done = subprocess.run(
            [sys.executable, script.name, *arguments], env=environment, capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(done.stderr[-3000:])
    result: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def token_ids(model: Path, prompts: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in prompts.read_text().splitlines()]
    return [tokenizer(text)["input_ids"][:256] for text in texts]


def main() -> None:
    model, prompts = prepare_demo(cache_folder(), DOCUMENTS)
    work = Path(tempfile.mkdtemp())
    ids = token_ids(model, prompts)
    (work / "ids.json").write_text(json.dumps(ids))
    tokens = sum(map(len, ids))
    rounds = []
    for number in range(ROUNDS):
        plain = run(PLAIN, str(model), str(work / "ids.json"))
        config = demo_config(model, prompts, str(work / f"out{number}")).model_dump(mode="json", exclude_defaults=True)
        started = time.perf_counter()
        ours = run(OURS, json.dumps(config))
        assert ours["tokens"] == tokens
        rounds.append(
            {
                "plain_tok_s": round(tokens / plain["seconds"], 1),
                "ours_tok_s": ours["tokens_per_second"],
                "ratio": round(ours["tokens_per_second"] * plain["seconds"] / tokens, 3),
                "plain_start_s": round(plain["start_s"], 1),
                "ours_planned_s": round(ours["planned_s"], 1),
                "ours_first_commit_s": round(ours["first_commit_s"], 1),
                "ours_command_s": round(time.perf_counter() - started, 1),
            }
        )
        print(rounds[-1], file=sys.stderr, flush=True)
    shutil.rmtree(work)
    print(
        json.dumps({"tokens": tokens, "rounds": rounds, "median_ratio": statistics.median(r["ratio"] for r in rounds)})
    )


if __name__ == "__main__":
    main()
