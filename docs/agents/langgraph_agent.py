"""A graph of LangGraph's with a tool; changed: the marked lines."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def search(query: str) -> str:
    """Find an article."""
    return f"Nothing is known of {query}."


async def run(example, base_url, api_key):  # changed: the address and the key are arguments
    """Answer a question, with tools."""
    model = ChatOpenAI(model="gpt-4o", base_url=base_url, api_key=api_key).bind_tools([search])  # changed

    async def answer(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    result = await graph.compile().ainvoke({"messages": [("user", example["question"])]})
    return result["messages"][-1].content
