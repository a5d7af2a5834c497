"""Programs with tools and with code. Programs after DSPy's own, written anew."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from dataclasses import replace
from typing import Any

import dspy
import pydantic

from tests.dspy import Works

SO = {"reasoning": "so"}
used = itertools.count()
"""How often `ticket` was really called: its answers differ from one call to the next."""


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def remote_weather(city: str) -> str:
    """The weather in a city, asked of a server."""
    await asyncio.sleep(0)
    return f"sunny in {city}"


def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


def ticket(kind: str) -> dict[str, Any]:
    """A new ticket; no two have the same number."""
    return {"kind": kind, "number": next(used)}


class Guest(pydantic.BaseModel):
    name: str
    nights: int = 1


class Booking(dspy.Signature):
    """You book rooms. Use tools to serve the guest."""

    request: str = dspy.InputField()
    confirmation: str = dspy.OutputField()


def find_guest(name: str) -> Guest:
    """Look a guest up."""
    return Guest(name=name, nights=2)


def book(guest: Guest) -> str:
    """Book a room for a guest."""
    return f"{guest.name} for {guest.nights}"


def step(tool: str, **arguments: Any) -> dict[str, Any]:
    """A reply of `ReAct`."""
    return {"next_thought": "go on", "next_tool_name": tool, "next_tool_args": arguments}


def calls(*named: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A reply of `ReActV2`."""
    return {
        "next_thought": "go on",
        "tool_calls": {"tool_calls": [{"name": name, "args": arguments} for name, arguments in named]},
    }


class ByHand(dspy.Module):
    """`dspy.ToolCalls` as an output, carried out by the program."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = [dspy.Tool(get_weather), dspy.Tool(divide)]
        signature = (
            dspy.Signature("question -> outputs")
            .prepend("tools", dspy.InputField(), type_=list[dspy.Tool])
            .with_updated_fields("outputs", type_=dspy.ToolCalls)
        )
        self.choose = dspy.Predict(signature)
        self.answer = dspy.Predict("question, results: list[str] -> answer")

    def forward(self, question: str) -> Any:
        chosen = self.choose(question=question, tools=self.tools).outputs
        results = [str(call.execute(functions=self.tools)) for call in chosen.tool_calls]
        return self.answer(question=question, results=results)


class Team(dspy.Module):
    """An agent whose tool is a predictor of the program, called inside of the tool's function."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = dspy.Predict("question -> advice")

        def ask_expert(question: str) -> str:
            """Ask an expert."""
            return str(self.expert(question=question).advice)

        self.lead = dspy.ReAct("question -> answer", tools=[ask_expert, ticket], max_iters=4)

    def forward(self, question: str) -> Any:
        return self.lead(question=question)


class InProcess:
    """An interpreter without a process of its own, as tests of DSPy have one."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    @property
    def tools(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        return None

    def shutdown(self) -> None:
        return None

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self.names)
        return printed.getvalue()


def square(n: int) -> int:
    """The square of n."""
    return n * n


REACT = {"react": 2, "extract.predict": 1}
WEATHER = Works(
    name="`dspy.ReAct` with a function as tool",
    # tutorials/agents
    make=lambda: dspy.ReAct("question -> answer", tools=[get_weather]),
    inputs={"question": "Weather in Rome?"},
    good=[step("get_weather", city="Rome"), step("finish"), {**SO, "answer": "sunny"}],
    bad=[step("get_weather", city="Oslo"), step("finish"), {**SO, "answer": "rain"}],
    solved=lambda p: p.answer == "sunny" and p.trajectory["observation_0"] == "sunny in Rome",
    calls=REACT,
)
V2 = Works(
    name="`dspy.ReActV2`",
    # tests/predict/test_react_v2.py
    make=lambda: dspy.ReActV2("question -> answer", tools=[get_weather, ticket]),
    inputs={"question": "Weather in Rome?"},
    good=[
        calls(("get_weather", {"city": "Rome"}), ("ticket", {"kind": "a"})),
        calls(("submit", {"answer": "sunny"})),
    ],
    bad=[calls(("submit", {"answer": "rain"}))],
    solved=lambda p: p.answer == "sunny" and p.termination_reason == "submit",
    calls={"react": 2},
    bad_calls={"react": 1},
)
AGENTS = [
    WEATHER,
    replace(
        WEATHER,
        name="`dspy.ReAct` with an async tool, as MCP's are",
        # tutorials/mcp
        make=lambda: dspy.ReAct("question -> answer", tools=[dspy.Tool(remote_weather, name="get_weather")]),
    ),
    Works(
        name="`dspy.ReAct` with pydantic models as arguments and results of tools",
        # tutorials/customer_service_agent
        make=lambda: dspy.ReAct(Booking, tools=[find_guest, book]),
        inputs={"request": "A room for Ada."},
        good=[
            step("find_guest", name="Ada"),
            step("book", guest={"name": "Ada", "nights": 2}),
            step("finish"),
            {**SO, "confirmation": "done"},
        ],
        bad=[step("finish"), {**SO, "confirmation": "no"}],
        solved=lambda p: p.trajectory.get("observation_1") == "Ada for 2",
        calls={"react": 3, "extract.predict": 1},
        bad_calls={"react": 1, "extract.predict": 1},
    ),
    Works(
        name="`dspy.ReAct` with a tool that raises, which its model sees",
        # tests/predict/test_react.py
        make=lambda: dspy.ReAct("question -> answer", tools=[divide]),
        inputs={"question": "1/0?"},
        good=[step("divide", a=1.0, b=0.0), step("finish"), {**SO, "answer": "undefined"}],
        bad=[step("divide", a=0.0, b=1.0), step("finish"), {**SO, "answer": "0"}],
        solved=lambda p: "ZeroDivisionError" in str(p.trajectory["observation_0"]),
        calls=REACT,
    ),
    Works(
        name="`dspy.ReAct` with a tool whose answers are never the same",
        # tutorials/mem0_react_agent
        make=lambda: dspy.ReAct("request -> answer", tools=[ticket]),
        inputs={"request": "A new ticket."},
        good=[step("ticket", kind="new"), step("finish"), {**SO, "answer": "done"}],
        bad=[step("finish"), {**SO, "answer": "no"}],
        calls=REACT,
        bad_calls={"react": 1, "extract.predict": 1},
        says="tools' results are recorded; forks get the same ones",
    ),
    replace(
        WEATHER,
        name="`dspy.ReAct` under `JSONAdapter`",
        # tests/predict/test_react.py
        adapter=dspy.JSONAdapter(),
    ),
    V2,
    replace(
        V2,
        name="`dspy.ReActV2` under `JSONAdapter`",
        # tests/predict/test_react_v2.py
        adapter=dspy.JSONAdapter(),
    ),
    Works(
        name="An agent as a tool of another",
        # tutorials/tool_use
        make=Team,
        inputs={"question": "What next?"},
        good=[
            step("ticket", kind="a"),
            step("ask_expert", question="next?"),
            {"advice": "rest"},
            step("finish"),
            {**SO, "answer": "rest"},
        ],
        bad=[step("finish"), {**SO, "answer": "work"}],
        solved=lambda p: p.answer == "rest" and p.trajectory["observation_1"] == "rest",
        calls={"expert": 1, "lead.react": 3, "lead.extract.predict": 1},
        bad_calls={"lead.react": 1, "lead.extract.predict": 1},
    ),
    Works(
        name="`dspy.ToolCalls` carried out by the program",
        # learn/programming/tools.md
        make=ByHand,
        inputs={"question": "Weather in Rome?"},
        good=[{"outputs": {"tool_calls": [{"name": "get_weather", "args": {"city": "Rome"}}]}}, {"answer": "sunny"}],
        bad=[{"outputs": {"tool_calls": []}}, {"answer": "rain"}],
        calls={"choose": 1, "answer": 1},
    ),
    Works(
        name="`dspy.ProgramOfThought` with an interpreter that is here",
        # tutorials/program_of_thought
        make=lambda: dspy.ProgramOfThought("question -> answer: int", interpreter_factory=InProcess),
        inputs={"question": "2+2?"},
        good=[{**SO, "generated_code": "```python\nprint(2 + 2)\n```"}, {**SO, "answer": 4}],
        bad=[{**SO, "generated_code": "```python\nprint(5)\n```"}, {**SO, "answer": 5}],
        calls={"code_generate.predict": 1, "generate_output.predict": 1},
        says="needs Deno, or an `interpreter_factory`",
    ),
    Works(
        name="`dspy.CodeAct` with an interpreter that is here",
        # api/modules/CodeAct.md
        make=lambda: dspy.CodeAct("n: int -> answer: int", tools=[square], interpreter_factory=InProcess),
        inputs={"n": 3},
        good=[{"generated_code": "```python\nprint(square(3))\n```", "finished": True}, {**SO, "answer": 9}],
        bad=[{"generated_code": "```python\nprint(3)\n```", "finished": True}, {**SO, "answer": 3}],
        solved=lambda p: p.answer == 9 and "9" in p.trajectory["code_output_0"],
        calls={"codeact": 1, "extractor.predict": 1},
        says="needs Deno, or an `interpreter_factory`",
    ),
]
