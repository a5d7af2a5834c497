"""What the guards of a rebuild call a difference, and what they take from the docs."""

from scripts import guards


def test_first_difference_names_line_and_place():
    assert guards.first_difference("a\nb", "a\nb") is None
    assert guards.first_difference("a\n0.1", "a\n0.2") == "line 2: '0.1' is now '0.2'"
    assert guards.first_difference("a", "a\nb") == "line 2: '(nothing)' is now 'b'"
    assert guards.compare({"x": "1"}, {"x": "1", "y": "2"})[1].startswith("differs  y")


def test_numbers_of_a_page_without_its_drawing():
    assert guards.numbers("<style>p {width: 3px}</style><p>f1 -0.5, n 16, 1e-06</p>").split() == ["-0.5", "16", "1e-06"]


def test_documented_lines_become_commands_that_only_compose():
    (one,) = guards.commands_of("mmrl train algo=grpo model.lora='{r: 8}' …   # a comment")
    assert one == ["train", "algo=grpo", "model.lora={r: 8}", "--cfg", "job"]
    rows = guards.commands_of("mmrl eval -m experiment=a/{x,y}_z,b seed=0,1")
    assert [row[1:3] for row in rows] == [[f"experiment={e}", "seed=0"] for e in ("a/x_z", "b", "a/y_z")]
    assert not list(guards.commands_of("mmrl train resume=RUN_DIR"))
