from types import SimpleNamespace

from scripts import newest


def test_caps_are_left_out_and_lower_bounds_stay():
    extras = {
        "server": ["uvicorn[standard]>=0.35,<1"],
        "win": ["pywin32>=300; sys_platform == 'nowhere'"],
        "dev": ["mmrl[server,win]", "ruff==0.15"],
    }
    found = newest.uncapped(["torch>=2.9,<2.14", "regex", "pydantic!=2.11,>=2.10,<3", "mmrl[dev]"], extras)
    assert [str(each) for each in found] == ["torch>=2.9", "regex", "pydantic>=2.10", "uvicorn[standard]>=0.35", "ruff"]


def test_who_keeps_a_package_back(monkeypatch):
    installed = {
        "mmrl": ["torch<2.14"],
        "vllm": ["Torch==2.14.0", "torch==2.13.0; python_version < '3'"],
        "trl": ["torch>=2", "torch<2; extra == 'old'"],
        "typing": None,
    }
    packages = [SimpleNamespace(name=name, requires=requires) for name, requires in installed.items()]
    monkeypatch.setattr(newest, "distributions", lambda: packages)
    assert newest.keepers("torch", "2.15.0") == ["vllm (==2.14.0)"]
