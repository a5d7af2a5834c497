"""What command lines compose, and what is wrong with them."""

from mmrl.cli.configs import eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.errors import ConfigError
from mmrl.run.check import check_all


def evaluation(*words):
    """The config of `mmrl eval WORDS`."""
    (config,) = eval_configs(read_line(words))
    return config


def refused(*words, command="train"):
    """What is said of a command line before anything loads; nothing where it is accepted."""
    try:
        line = read_line(words)
        check_all(train_configs(line) if command == "train" else eval_configs(line))
    except ConfigError as error:
        return list(error.problems)
    return []
