"""Processes that need the same index before it is there: one builds it, the others wait."""

import subprocess
import sys
from pathlib import Path

BUILDER = """
import sys, time
from pathlib import Path
from mmrl.config.retriever import Bm25Config
from mmrl.retrieval import index_folder
from mmrl.retrieval.base import Document

write = index_folder.write_passages

def slow(*arguments):
    print("builds", flush=True)
    time.sleep(2)
    return write(*arguments)

index_folder.write_passages = slow
documents = [Document(id=str(n), title=f"title {n}", text=f"words {n}") for n in range(20)]
print(index_folder.cached_index(documents, Bm25Config(name="bm25"), Path(sys.argv[1])).name)
"""


def test_a_second_process_waits_for_the_index_that_the_first_one_builds(tmp_path):
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    names = {lines[-1] for lines in printed}
    assert len(names) == 1 and sum("builds" in lines for lines in printed) == 1
    assert (tmp_path / "index" / names.pop() / "index.json").is_file()
