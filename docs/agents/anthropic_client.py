"""An agent with tools around Anthropic's client; changed: the marked lines."""

from anthropic import AsyncAnthropic

TOOLS = [
    {
        "name": "search",
        "description": "Find an article.",
        "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }
]


def search(query):
    """Stands for whatever the agent uses."""
    return f"Nothing is known of {query}."


async def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question, with tools."""
    # changed: this client adds /v1 itself
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        messages = [{"role": "user", "content": example["question"]}]
        for _ in range(4):
            async with client.messages.stream(
                model="claude", max_tokens=256, system="Be brief.", messages=messages, tools=TOOLS
            ) as stream:
                reply = await stream.get_final_message()
            if reply.stop_reason != "tool_use":
                return "".join(block.text for block in reply.content if block.type == "text")
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": search(**block.input)}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    return None
