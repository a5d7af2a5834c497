"""What the guards of a rebuild run: algorithms with options on forest files, and short training runs."""

from __future__ import annotations

MHGPO = "mhgpo_is,mhgpo_fof,mhgpo_rr,mhgpo_fof_os"
TURNS = "mt_grpo,mt_grpo_variable"
GROUPS = f"grpo,grpo_mr,mmgrpo,{MHGPO}"
CRITICS = "mappo,ppo,mt_ppo"
TREES = "agents forked round_robin oversampled trees_rr trees_is trees_os mixed"
CHAINS = "turns more_turns program mixed"
CREDIT: list[tuple[str, str, str]] = [
    *((algo, "turns more_turns program agents mixed", "") for algo in ("grpo", "grpo_mr", "mmgrpo", *TURNS.split(","))),
    *((algo, TREES, "") for algo in MHGPO.split(",")),
    ("mappo", "critic trees_rr mixed", ""),
    *((algo, "critic mixed", "") for algo in ("ppo", "mt_ppo")),
    ("ppo,mt_ppo", "search", "algo.beta=0"),
    ("ppo,mt_ppo", "observed", "algo.beta=0 algo.obs=all"),
    *(
        (GROUPS, "mixed trees_rr trees_os", options)
        for options in (
            "algo.loss_mean=token",
            "algo.loss_mean=constant",
            "algo.loss_mean=constant algo.loss_length=7",
            "algo.std_over=batch",
            "algo.scale=false",
            "algo.baseline=leave_one_out algo.scale=false",
            "algo.ddof=0 algo.eps=0.1",
            "algo.zero_variance=drop",
            "seed=3",
        )
    ),
    *(
        (MHGPO, "mixed trees_rr trees_is trees_os", options)
        for options in (
            "algo.aggregate=max",
            "algo.aggregate=min",
            "algo.aggregate=random seed=5",
            "algo.propagate=full",
            "algo.penalties=false",
            "algo.penalty_scale={answerer:2.0}",
            "algo.advantage_scale={answerer:0.5}",
            "algo.freeze_modules=[answerer]",
            "algo.train_modules=[answerer]",
        )
    ),
    ("mhgpo_rr", "trees_rr round_robin mixed", "algo.regroup=alg3 seed=2"),
    ("mhgpo_rr", "trees_rr round_robin mixed", "algo.regroup=agent_chunks algo.group_size=2"),
    ("mhgpo_fof_os", "trees_os oversampled", "algo.os_group=parent"),
    *(
        ("mmgrpo", "program mixed", options)
        for options in (
            "algo.filler=max",
            "algo.fill_source=group seed=1",
            "algo.padding_mode=truncate",
            "algo.padding_mode=ragged",
            "algo.padding_mode=ragged algo.failing_index=true",
            "algo.on_missing=skip_example",
            "algo.failing_traces=trajectory algo.on_missing=skip_example",
            "algo.group_size=3 algo.filler=max",
            "algo.max_context=20",
            "algo.max_context=20 algo.overlong=trajectory",
            "algo.format_failure_score=-2 algo.format_failure_best=0.5",
        )
    ),
    *(
        (TURNS, CHAINS, options)
        for options in (
            "algo.alpha=0.9 algo.turn_coef=0.5",
            "algo.missing_turn=exclude",
            "algo.missing_turn=zero",
            "algo.loss_mean=token algo.std_over=batch",
        )
    ),
    ("mt_grpo", CHAINS, "algo.no_tool=outcome"),
    *(
        (CRITICS, "critic mixed", options)
        for options in (
            "algo.beta=0.1",
            "algo.beta=0.1 algo.kl=loss",
            "algo.gamma=0.9 algo.gae_lambda=0.8",
            "algo.whiten=none",
            "algo.loss_mean=seq",
            "algo.loss_mean=constant",
        )
    ),
    ("mappo", "critic mixed", "algo.penalties=false"),
    ("mappo", "critic trees_rr", "algo.penalty_scale={answerer:2.0}"),
    *(
        ("ppo,mt_ppo", "observed mixed_observed", f"algo.beta=0 algo.obs=all {options}")
        for options in ("algo.position=turn_end", "algo.whiten=all", "algo.gamma=0.9 algo.gae_lambda=0.8")
    ),
    ("ppo,mt_ppo", "mixed_observed", "algo.beta=0.1 algo.obs=all"),
]
"""Algorithms (side by side in one command), forest files, options."""

COMMON = "seed=0 hardware.threads=1 run.progress=false"
SIX = "eval.items=16 train.steps=6 train.save_every=2"
THREE = "eval.items=16 train.steps=3 train.save_every=2"
RUNS = {
    "default": f"{SIX} eval.every=3",
    "mt_ppo": f"task=search_agent algo=mt_ppo {SIX} train.batch_size=24 eval.every=0",
    "mmgrpo": f"task=banking77 algo=mmgrpo {SIX} train.batch_size=6 eval.every=0",
    "grpo_mr": f"task=tool_agent algo=grpo_mr algo.group_size=8 {THREE} train.batch_size=8",
    "modules": "algo=mmgrpo model.lora={r:16,alpha:64} model.modules={} train.lr=1e-3 train.batch_size=4 " + THREE,
    # Not here: train.staleness=1, which only a vLLM server can sample for.
    "cpu2": "hardware=cpu2 eval.items=16 train.steps=3 train.batch_size=12",
}
SHORT = "train.steps=2 eval.every=0 eval.items=4 train.batch_size=4"
MORE = {
    "is_frozen": f"algo=mhgpo_is algo.freeze_modules=[reranker] algo.frozen_serving=true {SHORT}",
    "os_musique": f"task=musique algo=mhgpo_fof_os {SHORT}",
    "fof_2wiki_kl": f"task=2wiki algo=mhgpo_fof algo.beta=0.01 algo.zero_variance=refill {SHORT}",
    "mappo_epochs": f"algo=mappo algo.epochs=2 algo.minibatches=2 train.packing=padded {SHORT}",
    "ppo_adapter": f"task=tool_agent algo=ppo algo.critic=adapter model.lora={{r:8}} {SHORT}",
    "mt_grpo": f"task=tool_agent algo=mt_grpo algo.group_size=6 train.old_logprobs=recompute {SHORT}",
    "variable": f"task=search_agent algo=mt_grpo_variable algo.group_size=6 algo.clip_high=0.28 {SHORT}",
    "search_o1": f"task=search_o1 algo=grpo algo.group_size=6 algo.loss_mean=token {SHORT}",
    "r1_searcher": f"task=r1_searcher algo=grpo algo.group_size=6 algo.ratio_one=true {SHORT}",
    "qa_direct": f"task=qa_direct algo=grpo algo.group_size=6 task.chain_of_thought=true {SHORT}",
    "papillon": f"task=papillon algo=mmgrpo algo.rollouts=4 {SHORT}",
    "tis": f"train.old_logprobs=recompute train.tis=2.0 {SHORT}",
    "hover": f"task=hover algo=mmgrpo algo.rollouts=4 algo.reserialise=true {SHORT}",
}
RESUMED = ("mt_ppo", "mmgrpo", "grpo_mr", "modules")
"""Runs of `RUNS` with an earlier checkpoint, from which old directories are resumed."""
EVALS = {"default": "", "mt_ppo": "task=search_agent", "mmgrpo": "task=banking77", "modules": ""}
NOT_COMPARED = ("time/", "rate/", "memory/")
"""Metrics that depend on the machine and its load (docs/metrics.md)."""
MEASURED = r"(?m)^(time:|assumed:|  (prefill|decode|update) ).*\n"
"""Lines of `mmrl plan` that depend on them too, where it measures this machine."""

BATCH = """
import contextlib, io, json, runpy, sys, traceback
real = sys.stdout
for line in sys.stdin:
    sys.argv = ["mmrl", *json.loads(line)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("mmrl", run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 70
    real.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\\n")
"""
"""Many `python -m mmrl` in one process, as starting takes longer than what these commands do."""
