"""The configuration of a run: its fields, reading and writing it, and checking it."""

from anybatch.config.io import from_dict, override, read_config_file, to_dict, to_yaml
from anybatch.config.schema import (
    AdvantageConfig,
    AuxiliaryConfig,
    EnvConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    SourceConfig,
    TrainConfig,
)
from anybatch.config.validation import validate

__all__ = [
    "AdvantageConfig",
    "AuxiliaryConfig",
    "EnvConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutConfig",
    "SourceConfig",
    "TrainConfig",
    "from_dict",
    "override",
    "read_config_file",
    "to_dict",
    "to_yaml",
    "validate",
]
