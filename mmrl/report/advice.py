"""Advice for each known problem of a run, symptom and setting to change; for alarms and `mmrl doctor`.

One table, so that a trouble has the same sentence before a run (`report.doctor`) and while it trains
(`report.alarms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmrl.report.stats import short


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on a problem: its cause, and the setting to change."""

    symptom: str
    """Symptom as the metrics show it. `{now}` is a number and `{then}` what it is compared with, `{now_share}` and
    `{then_share}` in percent, `{only_share}` the first where it is small, `{ratio}` the first as a share of the second;
    `{subject}` is a name or a message, left out with its brackets where there is none."""
    change: str

    def text(self, now: float = 0.0, then: float = 0.0, subject: str = "") -> str:
        """Return both halves as one line, its numbers filled in."""
        text = self.symptom if subject else self.symptom.replace(" ({subject})", "")
        symptom = text.format(
            only_share=f"only {now:.0%}" if now else "none",
            now=short(now),
            then=short(then),
            now_share=f"{now:.0%}",
            then_share=f"{then:.0%}",
            ratio=f"{now / then:.0%}" if then else "-",
            subject=subject,
        )
        return f"{symptom}; {self.change}"


_LATER = "if reward has stopped rising, raise algo.temperature"
_READ = "read completions (mmrl show RUN step=N example=ID)"
_FORMAT = (
    "show the form that is expected in the prompt (task.prompts), let replies end (task.max_tokens), or take a model "
    "that keeps to it (model.path)"
)

FAILURES: Mapping[str, str] = {
    "program": "user_code",
    "reward": "user_code",
    "replay": "replay",
    "tool": "tool_faults",
    "judge": "endpoint_faults",
    "engine": "engine_faults",
    "timeout": "timeouts",
    "limit": "limits",
    "length": "prompt_too_long",
}
"""Kind of a failed rollout -> the trouble that it is; `parse` is one of a module."""

ADVICE: Mapping[str, Advice] = {
    # --- of rollouts and their scores, before a run and in it
    "never_parses": Advice("{only_share} of the replies can be parsed, so next to nothing is learned", _FORMAT),
    "never_valid": Advice("{now_share} of the replies are faulty ({subject}), so next to nothing is learned", _FORMAT),
    "seldom_parses": Advice("{only_share} of the replies can be parsed", _FORMAT),
    "cut": Advice(
        "{now_share} of the replies are cut at the limit of {subject}",
        "raise task.max_tokens (and task.max_context, where prompt and reply fill it), or see that the model's chat "
        "template has an end of turn (model.chat_template)",
    ),
    "zero_variance": Advice(
        "{now_share} of the groups have equal rewards, so almost nothing is learned",
        "take easier or harder examples (task.data), more rollouts per group (algo.group_size; mmgrpo: "
        "algo.rollouts), a lower algo.temperature where evaluations score far above rollouts, or a reward with more "
        "than one value (task.reward, task.metric)",
    ),
    "unparsed_rollouts": Advice(
        "{now_share} of the rollouts end at a reply that cannot be parsed, so next to nothing is learned", _FORMAT
    ),
    "prompt_too_long": Advice(
        "{now_share} of the rollouts end at a prompt that leaves no room in the context ({subject})",
        "raise task.max_context up to the model's own limit, take fewer or shorter documents "
        "(task.retriever.top_k, task.max_observation), or shorten task.prompts (where prompts are optimised, fewer "
        "demonstrations: algo.max_labeled_demos)",
    ),
    "limits": Advice(
        "{now_share} of the rollouts reach a limit of the program without an answer ({subject})",
        "raise that limit (task.max_turns, task.max_completion, max_iters of a DSPy agent)",
    ),
    "user_code": Advice(
        "{now_share} of the rollouts fail in the program's or the metric's own code ({subject})",
        "mend the line or the setting that it names (task.program, task.agent, task.metric)",
    ),
    "replay": Advice(
        "{now_share} of the rollouts cannot be forked, since the program does not repeat its requests ({subject})",
        "make it (task.program, task.agent) depend on its example and on what its models and tools return alone: no "
        "random numbers, clock or state of its own; algo=mmgrpo and algo=grpo do not fork",
    ),
    "logprob_gap": Advice(
        "sampler and trainer disagree by {now} nats per token",
        "weights out of step, or another precision or temperature on one side: compare model.dtype with the engine's "
        "and see engine.logprobs; train.old_logprobs=recompute hides it from the ratio",
    ),
    "failures": Advice(
        "{now_share} of the rollouts fail by no doing of the model",
        "rollouts/failed/<kind> says why (program, reward, replay: your code; the journal has the traceback), and mmrl "
        "doctor with the run's settings shows messages; with endpoints "
        "raise their attempts and timeout_s (engine.endpoints, task.judge, task.external)",
    ),
    "judge_unreadable": Advice(
        "{now_share} of the rollouts are scored by the fixed rule, since no reply of the judge can be read: rewards "
        "are too low",
        "raise task.judge.max_tokens, or take another task.judge.model",
    ),
    "trials_fail": Advice(
        "{subject}; {now} of {then} trials are like this",
        "where the start is among them, show the form that is expected (task.prompts), let replies end "
        "(task.max_tokens), or take another model (model.path); where only candidates are, the model does not bear "
        "their demonstrations: fewer of them (algo.max_bootstrapped_demos, algo.max_labeled_demos)",
    ),
    # --- before a run
    "prompt_near_limit": Advice(
        "prompts of up to {now} tokens leave fewer than task.max_tokens for the reply in a context of {then}",
        "raise task.max_context up to the model's own limit, or lower task.max_tokens or task.retriever.top_k",
    ),
    "endpoint_faults": Advice(
        "{now_share} of the rollouts fail since an endpoint gave no answer ({subject})",
        "see its url, model and key_env (engine.endpoints.<module>, task.judge, task.external); raise its timeout_s "
        "and attempts, lower its concurrency",
    ),
    "endpoint_retries": Advice(
        "{now_share} of the requests to endpoints had to be repeated",
        "lower concurrency or set requests_per_minute of the endpoint (engine.endpoints.<module>)",
    ),
    "engine_faults": Advice(
        "{now_share} of the rollouts fail in the engine ({subject})",
        "see its address and limits (engine.urls, engine.timeout_s, engine.args), or take engine=transformers",
    ),
    "tool_faults": Advice(
        "{now_share} of the rollouts fail in a tool ({subject})",
        "mend the tool, or its address and time limit (task.retriever.url, task.retriever.timeout_s)",
    ),
    "timeouts": Advice("{now_share} of the rollouts take too long ({subject})", "raise task.timeout_s"),
    "packing": Advice("{subject}", "this model's layers cannot share prefixes: use train.packing=padded"),
    "copies_prompt": Advice(
        "{now_share} of the replies are the same words of the prompt: {subject}",
        "show the form by demonstrations that differ, not by an example inside of the instruction (task.prompts)",
    ),
    "no_tool_calls": Advice(
        "no rollout uses a tool; a reply: {subject}",
        "begin with a supervised start (algo=sft), show a call in the prompt, or take a model that writes calls in the "
        "form of its own chat template (model.path)",
    ),
    "no_gold": Advice(
        "the corpus can answer {now_share} of the training questions",
        "take the corpus that belongs to the data (task.corpus, task.retriever.index)",
    ),
    "gold_not_found": Advice(
        "no rollout was brought a gold document",
        "raise task.retriever.top_k, or take another retriever (task.retriever.name, task.retriever.index)",
    ),
    "empty_searches": Advice(
        "{now_share} of the calls of tool {subject} bring nothing",
        "see that corpus and queries are of one language and kind (task.corpus, task.retriever.name)",
    ),
    # --- of the course of a run
    "states_never_repeat": Advice(
        "{now_share} of the calls after the first were made in a state that another call has too, so GiGPO is GRPO",
        "let the program name states (facts={'state': …} of ctx.call, docs/credits.md), or take algo=grpo",
    ),
    "gold_unlikely": Advice(
        "the gold answer has a probability of {now} before a call, so gains are near 0 and normalised as noise",
        "take task.gain=logprob, or close the prompt as the model answers (`closing` of the task, docs/credits.md)",
    ),
    "untaught": Advice(
        "{now_share} of the calls have no teacher: with algo.privileged they are too long for it, a field is empty, or "
        "the score says nothing for feedback",
        "shorten algo.privileged, fill its fields, or take a teacher with a longer context",
    ),
    "rewards_outweighed": Advice(
        "what teachers say weighs {now} times as much as rewards, which then change little",
        "lower algo.distill_coef, or let teachers train alone (algo=distill)",
    ),
    "gains_small": Advice(
        "turn rewards of task.reward=privileged are {now} of the outcome's deviation, so they are lost beside it",
        "take task.privileged=sum, more of what the answer rests on in algo.privileged, or algo=mt_grpo_variable, "
        "which normalises each turn on its own",
    ),
    "unlearned": Advice(
        "evaluations lost {now} of {subject} or more since before training, beyond chance",
        "see which module's: its replies (mmrl show), its reward (algo.propagate, task.reward), a lower train.lr or a "
        "higher algo.beta, an earlier checkpoint",
    ),
    "reward_collapse": Advice(
        "reward fell to {now} from its best of {then}",
        "go back to an earlier checkpoint, with a lower train.lr or a higher algo.beta",
    ),
    "kl_explosion": Advice(
        "KL to the reference is {now} nats per token, after {then} at first", "lower train.lr or raise algo.beta"
    ),
    "clipping": Advice(
        "{now_share} of the trained tokens are clipped, so most of the batch has no gradient",
        "lower train.lr, or fewer algo.epochs and algo.minibatches",
    ),
    "answers_growing": Advice(
        "answers grew from {then} to {now} words",
        "a reward that looks for the right answer inside the given one (docs/rewards.md) rises with its length: "
        "compare task/em and task/f1, take another task.reward",
    ),
    "many_candidates": Advice(
        "answers name {now} candidates each",
        "a reward that looks for the right answer inside the given one (docs/rewards.md) is earned by a list: compare "
        "task/em, read rollouts with mmrl show, take another task.reward",
    ),
    "calls_falling": Advice(
        "rollouts fell to {now} calls from {then}: the policy stopped using its tools or fails early",
        "reward its turns (algo=mt_grpo, mt_ppo), or read rollouts with mmrl show",
    ),
    "entropy_collapse": Advice(
        "entropy is {now}, {ratio} of what it was at first: nearly all samples agree", f"{_LATER} or lower train.lr"
    ),
    "format_falling": Advice(
        "valid share fell to {now_share} from {then_share}", f"{_READ}, lower train.lr or raise algo.beta"
    ),
    "faults_rising": Advice(
        "faulty share rose to {now_share} from {then_share}", f"{_READ}, lower train.lr or raise algo.beta"
    ),
    "length_growing": Advice(
        "completions grew from {then} to {now} tokens",
        "length may be what earns reward: lower task.max_tokens, or take another task.reward",
    ),
    "copies": Advice("texts of a group agree to {now_share}: exploration is gone", _LATER),
    "not_finite": Advice("{subject}", "lower train.lr, or set model.dtype=float32"),
}
