"""EnvPool and Procgen, as installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from anybatch.config.schema import EnvConfig
from anybatch.envs.base import derive_seeds
from anybatch.envs.envpool import EnvPoolVectorEnv, check_options, make_spec
from anybatch.envs.factory import make
from anybatch.envs.factory import spaces as spaces_of
from anybatch.envs.procgen import GAMES, NORMALIZATION, list_procgen, normalized_return, require_qt
from anybatch.errors import ConfigError, EnvError

pytest.importorskip("envpool")


def config(name: str, **options: object) -> EnvConfig:
    return EnvConfig(id=name, options=options, threads=1)  # type: ignore[arg-type]


def test_atari_s_games_have_several_lives_and_their_own_rewards() -> None:
    """Breakout has 5 lives, and bricks of the upper rows give 4 and 7 points."""
    options = {"episodic_life": True, "reward_clip": True}
    env = make(config("envpool:Breakout-v5", **options), 4, 3)
    env.reset()
    rng, lives, games, points, clipped = np.random.default_rng(0), 0, 0, 0.0, 0.0
    for _ in range(600):
        steps = env.step(rng.integers(4, size=4))
        assert steps.games is not None
        reward, over = steps.counted
        assert (reward >= steps.reward).all() and (over <= steps.done).all()
        lives, games = lives + int(steps.done.sum()), games + int(over.sum())
        points, clipped = points + float(reward.sum()), clipped + float(steps.reward.sum())
    env.close()
    assert games >= 4 and 4 * games < lives <= 5 * (games + 4)
    assert points >= clipped > 0 and set(np.unique(steps.reward)) <= {0.0, 1.0}
    plain = make(config("envpool:Breakout-v5"), 1, 3)
    plain.reset()
    assert plain.step(np.array([0])).games is None
    plain.close()


class TestProcgen:
    @pytest.mark.parametrize("game", GAMES)
    def test_every_game(self, game: str) -> None:
        env = make(config(f"procgen:{game}"), 1, 0)
        observation = env.reset()
        assert observation.shape == (1, 64, 64, 3) and observation.dtype == np.uint8
        assert observation.flags.c_contiguous and observation.std() > 0
        assert env.action_space == spaces.Discrete(15) and env.observation_space.shape == (64, 64, 3)
        assert not env.bootstrap_truncated and env.save_state() is None
        for action in range(5):
            steps = env.step(np.array([action]))
            assert steps.observation.shape == (1, 64, 64, 3) and steps.reward.shape == (1,)
        env.close()

    def test_every_mode_is_listed_and_made(self) -> None:
        listed = list_procgen()
        assert len(listed) == 50 and "maze-memory" in listed and "bigfish-extreme" not in listed
        for name in (
            "procgen:maze-memory",
            "procgen:chaser-extreme",
            "procgen:ninja-exploration",
            "procgen:heist-easy",
        ):
            assert make(config(name), 1, 0).reset().shape == (1, 64, 64, 3)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "procgen:starpliot-easy",
                r"env.id is 'procgen:starpliot-easy'.*bigfish.*did you mean 'procgen:starpilot-easy'",
            ),
            ("procgen:bigfish-extreme", r"modes of bigfish are easy, hard"),
            (
                "procgen:maze-memroy",
                r"modes of maze are easy, hard, memory, exploration; did you mean 'procgen:maze-memory'",
            ),
            ("envpool:CartPol-v1", r"did you mean .*envpool:CartPole-v1"),
            ("envpool:MazeMemor-v0", r"^(?!.*MazeMemory)"),
            ("MazeMemory-v0", r"did you mean 'procgen:maze-memory'"),
        ],
    )
    def test_bad_ids(self, name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make(config(name), 1, 0)

    @pytest.mark.parametrize("option", ["numlevels", "seed", "distribution_mode", "channel_first", "num_envs"])
    def test_bad_option(self, option: str) -> None:
        with pytest.raises(ConfigError, match=rf"env.options has '{option}'.*num_levels.*use_backgrounds"):
            make(config("procgen:coinrun", **{option: 1}), 1, 0)

    @pytest.mark.parametrize("value", ["many", 1.5, float("inf")])
    def test_bad_option_type(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"env.options.num_levels is '?{value}'?, .*needs the type int"):
            make(config("procgen:coinrun", num_levels=value), 1, 0)

    def test_procgen_by_the_ids_of_envpool_does_not_bootstrap_either(self) -> None:
        found = [make(config(name), 1, 0) for name in ("envpool:MazeMemory-v0", "envpool:CartPole-v1")]
        assert [env.bootstrap_truncated for env in found] == [False, True]

    def test_a_whole_float_is_an_integer(self) -> None:
        require_qt()
        spec = make_spec("CoinrunHard-v0", "coinrun")
        checked = check_options({"num_levels": 1e3}, spec, "coinrun", reserved=frozenset())
        assert checked == {"num_levels": 1000} and type(checked["num_levels"]) is int

    @pytest.mark.parametrize(
        ("name", "option", "value"),
        [
            ("envpool:Pong-v5", "stack_num", 0),
            ("envpool:Pong-v5", "noop_max", -1),
            ("envpool:Pong-v5", "img_height", 0),
            ("envpool:FrozenLake-v1", "size", -1),
            ("procgen:coinrun", "num_levels", 2**40),
        ],
    )
    def test_options_that_would_end_the_process(self, name: str, option: str, value: int) -> None:
        with pytest.raises(ConfigError, match=rf"env.options.{option} is {value}, but must be"):
            make(config(name, **{option: value}), 1, 0)

    def test_options_arrive(self) -> None:
        env = make(config("procgen:coinrun-easy", num_levels=1, start_level=7, use_backgrounds=False), 8, 3)
        first = env.reset()
        assert (first == first[0]).all()  # one level only
        other = make(config("procgen:coinrun-easy", num_levels=1, start_level=8, use_backgrounds=0), 8, 3).reset()
        assert not np.array_equal(first, other)

    def test_layout_is_the_channel_first_one_transposed(self) -> None:
        ours = make(config("procgen:coinrun-hard"), 2, 0)
        theirs = EnvPoolVectorEnv("CoinrunHard-v0", derive_seeds(0, 2), env_id="theirs", options={}, threads=1)
        a, b = ours.reset(), theirs.reset()
        for _ in range(20):
            assert b.shape == (2, 3, 64, 64) and np.array_equal(a, b.transpose(0, 2, 3, 1))
            a, b = (env.step(np.array([5, 7])).observation for env in (ours, theirs))

    def test_seeds(self) -> None:
        def levels(seed: int) -> list[int]:
            env = make(config("procgen:starpilot"), 8, seed)
            env.reset()
            pool = env._pool
            inner, seen = pool.reset, [*pool.reset()[1]["level_seed"].tolist()]

            def spy(ids: np.ndarray) -> object:
                raw, info = inner(ids)
                seen.extend(info["level_seed"].tolist())
                return raw, info

            pool.reset = spy
            rng = np.random.default_rng(0)
            for _ in range(300):
                env.step(rng.integers(0, 15, 8))
            return seen

        one, two, again = levels(1), levels(2), levels(1)
        assert len(one) > 20 and one == again and not set(one) & set(two)

    def test_render_is_large_and_changes_nothing(self) -> None:
        plain, drawn = make(config("procgen:starpilot"), 1, 0), make(config("procgen:starpilot"), 1, 0, rendering=True)
        assert np.array_equal(plain.reset(), drawn.reset())
        assert plain.render().shape == (64, 64, 3)
        for _ in range(30):
            assert drawn.render().shape == (512, 512, 3)
            a, b = plain.step(np.array([9])), drawn.step(np.array([9]))
            assert np.array_equal(a.observation, b.observation)

    def test_normalized_return(self) -> None:
        assert len(GAMES) == len(NORMALIZATION) == 16
        assert normalized_return("starpilot", 35.0) == 1.0 and normalized_return("coinrun", 7.5) == 0.5
        with pytest.raises(ConfigError, match="'pong' is not a Procgen game"):
            normalized_return("pong", 0.0)

    def test_after_somebody_else_imported_envpool(self) -> None:
        code = (
            "import envpool\nfrom anybatch.config.schema import EnvConfig\nfrom anybatch.envs.factory import make\n"
            "print(make(EnvConfig(id='procgen:maze'), 1, 0).reset().shape)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert result.stdout.strip() == "(1, 64, 64, 3)", result.stderr

    def test_without_qt_names_both_remedies(self) -> None:
        code = (
            "import anybatch.system.qt as qt\nimport importlib.util as u\nfind = u.find_spec\n"
            "u.find_spec = lambda name, *a: None if name == 'PyQt5' else find(name, *a)\n"
            "from anybatch.config.schema import EnvConfig\nfrom anybatch.envs.factory import make\n"
            "make(EnvConfig(id='procgen:maze'), 1, 0)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            pytest.skip("the system has its own Qt 5")
        last = result.stderr.strip().splitlines()
        assert any("EnvError" in line and "'.[procgen]'" in line and "system's Qt 5" in line for line in last), last

    def test_importing_envs_leaves_envpool_alone(self) -> None:
        code = "import sys, anybatch.envs; print('envpool' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "False"


class TestEnvPool:
    def test_cartpole_counts_every_reward_once(self) -> None:
        env = make(config("envpool:CartPole-v1"), 8, 0)
        env.reset()
        rng = np.random.default_rng(0)
        length, episodes = np.zeros(8), 0
        for _ in range(400):
            steps = env.step(rng.integers(0, 2, 8))
            assert (steps.reward == 1.0).all()  # the phantom row of a late reset has reward 0
            length += steps.reward
            # Steps are 0.02 s at less than 4 m/s from a start within 0.05: the state tells the row after a reset.
            fresh = (np.abs(steps.observation) <= 0.05).all(axis=1)
            assert fresh[steps.done].all()
            assert (length[steps.done] >= 8).all()  # CartPole cannot fall in fewer steps
            episodes += int(steps.done.sum())
            length[steps.done] = 0
        assert episodes > 100

    def test_truncation_keeps_the_last_observation(self) -> None:
        env = make(config("envpool:CartPole-v1", max_episode_steps=5), 3, 0)
        before = env.reset()
        for t in range(1, 11):
            steps = env.step(np.full(3, t % 2))
            moved = before + 0.02 * np.roll(before, -1, axis=1)  # x' = x + 0.02 v holds exactly for the position
            true = steps.final_observation if t % 5 == 0 else steps.observation
            assert np.allclose(true[:, 0], moved[:, 0], atol=1e-6)
            assert (steps.final_index.tolist() == [0, 1, 2]) == (t % 5 == 0) == steps.truncated.all()
            before = steps.observation

    def test_procgen_never_repeats_a_step(self) -> None:
        env = make(config("procgen:starpilot"), 4, 0)
        env.reset()
        pool, seen = env._pool, []
        inner = pool.step

        def spy(action: np.ndarray) -> object:
            result = inner(action)
            seen.append(result[4]["elapsed_step"].copy())
            return result

        pool.step = spy
        rng = np.random.default_rng(1)
        expected, ends = np.zeros(4), 0
        for _ in range(600):
            steps = env.step(rng.integers(0, 15, 4))
            expected += 1
            assert seen[-1].tolist() == expected.tolist()
            expected[steps.done] = 0
            ends += int(steps.done.sum())
        assert ends > 5

    def test_memory_is_not_reused(self) -> None:
        env = make(config("envpool:Acrobot-v1"), 4, 0)
        kept = [env.reset()]
        kept += [env.step(np.zeros(4, np.int64)).observation for _ in range(300)]
        copies = [batch.copy() for batch in kept[:50]]
        for _ in range(300):
            env.step(np.ones(4, np.int64))
        assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=False))

    @pytest.mark.parametrize(
        "name", ["FrozenLake-v1", "MiniGrid-Empty-5x5-v0", "Pendulum-v1", "NChain-v0", "Blackjack-v1"]
    )
    def test_other_spaces(self, name: str) -> None:
        env = make(config(f"envpool:{name}"), 3, 0)
        assert spaces_of(config(f"envpool:{name}")) == (env.observation_space, env.action_space)
        observation = env.reset()
        env.action_space.seed(0)
        for _ in range(50):
            rows = observation.items() if isinstance(observation, dict) else [("", observation)]
            for key, array in rows:
                space = env.observation_space[key] if key else env.observation_space
                assert array.shape == (3, *space.shape) and array.dtype == space.dtype
            observation = env.step(np.stack([env.action_space.sample() for _ in range(3)])).observation

    def test_seeds_do_not_overlap(self) -> None:
        batches = [make(config("envpool:CartPole-v1"), 4, seed).reset() for seed in (1, 2, 1)]
        assert np.array_equal(batches[0], batches[2])
        assert len({tuple(row) for batch in batches[:2] for row in batch.tolist()}) == 8

    def test_refuses_several_players(self) -> None:
        with pytest.raises(EnvError, match="several players"):
            make(config("envpool:IntersectionMultiAgent-v0"), 1, 0)
