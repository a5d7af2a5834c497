"""What a run keeps of the code that is the user's."""

import importlib
import sys
from pathlib import Path

from mmrl.store.machine import changed_code, describe_environment
from mmrl.system.files import file_digest


def test_modules_of_the_user_are_recorded_and_what_changes_since_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_program_of_this_test", "own_helper_of_this_test"):
        Path(f"{name}.py").write_text("one = 1\n")
    Path("own_program_of_this_test.py").write_text("import own_helper_of_this_test\n")
    importlib.import_module("own_program_of_this_test")
    facts = describe_environment(())
    for name in ("own_program_of_this_test", "own_helper_of_this_test"):
        assert facts["own_code"][f"{name}.py"] == file_digest(Path(f"{name}.py"))
        sys.modules.pop(name)
    user = tmp_path / "user" / "site"
    user.mkdir(parents=True)
    monkeypatch.setattr("site.getusersitepackages", lambda: str(user))
    (user / "own_installed_of_this_test.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(user)
    importlib.import_module("own_installed_of_this_test")
    assert not any("own_installed" in name for name in describe_environment(())["own_code"]), "by pip install --user"
    sys.modules.pop("own_installed_of_this_test")
    assert not any("site-packages" in name or "/mmrl/" in name for name in facts["own_code"])
    assert changed_code(facts) == [] == changed_code({})
    Path("own_helper_of_this_test.py").write_text("one = 2\n")
    monkeypatch.chdir("/")
    assert changed_code(facts) == ["own_helper_of_this_test.py"]
