#!/bin/bash
# The table of docs/audit.md: every credit on four programs, or those named, at the start and after 20 steps of grpo. Goes on
# where it was stopped.
set -u
M=${M:-mmrl}; OUT=${OUT:-outputs/audits/table}; X=${X:-}   # X: further keys for all, e.g. X="examples=8 continuations=8 batches=6 budgets=1,2"
ROWS=grpo,mmgrpo,dr_mas,gigpo,ccpo,tree_grpo,mhgpo_fof,mhgpo_is,mhgpo_rr,mhgpo_fof_os,c3,ppo,mappo
SIZES="tree_grpo.algo.group_size=3 mmgrpo.algo.rollouts=4"; for a in grpo dr_mas gigpo ccpo mhgpo_fof mhgpo_is mhgpo_rr mhgpo_fof_os c3; do SIZES="$SIZES $a.algo.group_size=4"; done
TURNS=grpo,grpo_mr,mt_grpo,mt_grpo_variable,igpo,gigpo,dr_mas,tree_grpo,mmgrpo,c3,ppo,mt_ppo
TSIZES="mmgrpo.algo.rollouts=4"; for a in grpo grpo_mr mt_grpo mt_grpo_variable igpo gigpo dr_mas mmgrpo; do TSIZES="$TSIZES $a.algo.group_size=4"; done
AGENT="task=agent model.path=tiny_agent task.agent=docs.agents.planner_worker:run task.metric=docs.agents.planner_worker:metric task.inputs=[question] task.modules=[planner,worker] task.data.train=docs.agents.planner_worker:TRAIN task.data.dev=docs.agents.planner_worker:DEV"
one() { # name, rows, sizes, task words
  [ -f $OUT/$1-run/summary.json ] || if [ -d $OUT/$1-run ]; then $M train resume=$OUT/$1-run; else $M train algo=grpo algo.group_size=8 train.steps=20 run.dir=$OUT/$1-run $4; fi
  $M audit algo=$2 $3 $X $4 out=$OUT/$1-start
  $M audit algo=$2 $3 $X policy=$OUT/$1-run out=$OUT/$1-after
}
for program in ${*:-hotpotqa search_agent papillon planner_worker}; do case $program in
  search_agent) one search_agent $TURNS "$TSIZES" task=search_agent ;;
  planner_worker) M="${AGENTS:-.venv-agents/bin/python -m mmrl}" one planner_worker $ROWS "$SIZES" "$AGENT" ;;
  *) one $program $ROWS "$SIZES" task=$program ;;
esac; done
