"""An agent with tools around OpenAI's client, as in its own documentation; changed: the marked lines."""

import json

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find an article.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def search(query):
    """Stands for whatever the agent uses."""
    return f"Nothing is known of {query}."


async def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question, with tools."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:  # changed
        messages = [{"role": "user", "content": example["question"]}]
        for _ in range(4):
            reply = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                result = search(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
