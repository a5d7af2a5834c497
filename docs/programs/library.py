"""An environment in the form of TRL's `environment_factory`: a library to search in, on the embedded mini world."""

from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.tasks.metrics import f1
from mmrl.tasks.mini.examples import mini_corpus, mini_multihop

RETRIEVER = Bm25Retriever(mini_corpus())


def records(split):
    """Questions of the mini world as conversations, and their answers."""
    system = {"role": "system", "content": "Search by the plan, then answer."}
    return [
        {
            "id": example.id,
            "prompt": [system, {"role": "user", "content": example.inputs["question"]}],
            "answers": example.metadata["answers"],
        }
        for example in mini_multihop(split)
    ]


TRAIN, DEV = records("train"), records("dev")


def demonstrations():
    """Conversations for a supervised start (`algo.source=file`): searches by the right titles, then the answer."""
    from transformers.utils import get_json_schema

    tools, talks = [get_json_schema(Library().search)], []
    for example, record in zip(mini_multihop("train", stepwise=True), TRAIN, strict=True):
        library, messages = Library(), [*record["prompt"]]
        library.reset(**record)
        for hop in example.metadata["hops"]:
            call = {"type": "function", "function": {"name": "search", "arguments": {"query": hop["query"]}}}
            found = {"role": "tool", "name": "search", "content": library.search(hop["query"])}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, found]
        messages.append({"role": "assistant", "content": record["answers"][0]})
        talks.append({"messages": messages, "tools": tools})
    return talks


class Library:
    """What one reader has found. TRL's trainer runs it unchanged: it reads nothing that begins with an underscore."""

    def reset(self, answers, **columns):
        """Begin with a record's columns; a text would be appended to its prompt."""
        self._answers, self._shown = answers, ""

    def search(self, query: str) -> str:
        """
        Find an article.

        Args:
            query: what to look for
        """
        if not query.strip():
            raise ValueError("the query is empty")  # the model reads the error
        before = self._found()
        (documents,) = RETRIEVER.search([query], [1])
        text = "\n".join(f"{document.title} | {document.text}" for document in documents)
        self._shown += f"{text}\n"
        self._turn_reward = 0.3 * (self._found() - before)
        return text

    _turn_reward = 0.0  # after each action: for mt_grpo_variable, mt_ppo, gigpo, igpo

    def _state(self):
        """Name the state that the next turn begins in, for gigpo; without it, it is what the tool said."""
        return self._shown

    def _found(self):
        return any(answer.lower() in self._shown.lower() for answer in self._answers)


def reward(completions, answers, **columns):
    """F1 of the last message with the best of the right answers: a reward function in TRL's form."""
    texts = [messages[-1].get("content") or "" for messages in completions]
    return [max(f1(text, right) for right in rights) for text, rights in zip(texts, answers, strict=True)]
