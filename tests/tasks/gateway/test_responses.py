"""The second protocol of OpenAI's clients: what goes on, what streams, what is refused."""

import openai
import pytest

from tests.helpers.gateway import Scripted, agent_task, one, tokenizer

SEARCH = {
    "type": "function",
    "name": "search",
    "strict": True,
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "Porto"}}\n</tool_call>'
TWICE = f"I look.\n{CALLED}\n{CALLED}"


def reply(prompt):
    return TWICE if "a city" not in prompt else CALLED if "once more" not in prompt else "In Portugal."


def agent_of(work, metric=lambda record, result: 1.0):
    async def agent(example, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as asking:
            return await work(asking)

    return agent_task(agent, metric=metric)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_sent_back_in_input_goes_on_in_its_context(stream):
    """As the Agents SDK does it: the items of a reply, its text and both calls, then a result for each of them."""
    said = []

    async def work(asking):
        items = [{"role": "user", "content": "Where is Porto?"}]
        options = {"model": "m", "instructions": "Be brief.", "tools": [SEARCH], "include": [], "store": False}
        for added in ("a city", "once more", None):
            if stream:
                async with asking.responses.stream(input=items, **options) as events:
                    response = await events.get_final_response()
            else:
                response = await asking.responses.create(input=items, **options)
            said.append(response)
            unwanted = {"parsed_arguments", "parsed"}
            for item in response.output:
                sent = item.model_dump(exclude_none=True, exclude=unwanted, warnings=False)
                if item.type == "message":
                    sent["content"] = [{"type": "output_text", "text": part.text} for part in item.content]
                items.append(sent)
            calls = [item for item in response.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": added} for call in calls]

    engine = Scripted(reply, tokenizer("qwen3"))
    rollout, calls = one(agent_of(work), engine)
    assert rollout.error is None, rollout.error_message
    assert [[item.type for item in response.output] for response in said] == [
        ["message", "function_call", "function_call"],
        ["function_call"],
        ["message"],
    ]
    assert (said[0].output_text, said[2].output_text) == ("I look.", "In Portugal.")
    assert [response.usage.output_tokens for response in said] == [len(call.completion_ids) for call in calls]
    assert [(call.turn, call.facts["rewritten_history"]) for call in calls] == [(0, 0), (1, 0), (2, 0)]
    assert "Be brief." in engine.prompts[0] and engine.prompts[1].count("a city") == 2


def test_its_ids_take_rewards_of_single_calls():
    async def work(asking):
        ids = [(await asking.responses.create(model="m", input="Where?")).id for _ in range(2)]
        return {"score": 0.0, "rewards": {ids[0]: 0.5}}

    rollout, calls = one(agent_of(work, metric=None), Scripted(lambda prompt: "x"), reward_set="turn")
    assert rollout.error is None, rollout.error_message
    assert calls[0].turn_reward == 0.5


def test_a_reply_that_is_cut_off_is_incomplete():
    said = []

    async def work(asking):
        said.append(await asking.responses.create(model="m", input="Where?", max_output_tokens=3))

    one(agent_of(work), Scripted(lambda prompt: "In the north of Portugal."))
    assert (said[0].status, said[0].incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.message.content",
        ),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"strange": 1}, "strange"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_had_is_named(change, param):
    async def work(asking):
        with pytest.raises(openai.BadRequestError) as refused:
            await asking.responses.create(model="m", input="Where?", extra_body=change)
        assert refused.value.param == param
        await asking.responses.create(model="m", input="Where?")

    rollout, calls = one(agent_of(work), Scripted(lambda prompt: "x"))
    assert rollout.error is None and len(calls) == 1, rollout.error_message
