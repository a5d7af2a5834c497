"""How problems are printed."""

from mmrl.errors import DataError, print_error


def test_many_and_long_problems_are_printed_in_part(capsys):
    print_error(DataError([f"line {n}: wrong" for n in range(250)]))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 101 and lines[99] == "error: line 99: wrong" and lines[100] == "error: 150 more problems"
    print_error(DataError("a: got 'x\ny'"))
    assert capsys.readouterr().err == "error: a: got 'x y'\n"
    print_error(DataError("x" * 5000))
    assert capsys.readouterr().err == f"error: {'x' * 2000}... (3000 more characters)\n"
