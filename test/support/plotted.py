"""Run folders for tests of plots."""

import json

from torchrl_marl.recipes import load_config, save_config

TOY = "toy_arena_mappo"

HEAD = "iteration,frames,agent_frames,seconds,frames_per_second,agents/episode_reward,agents/kl"


def make_run(folder, seed=0, rewards=(1.0, 2.0, 3.0), last="", **overrides):
    folder.mkdir(parents=True)
    save_config(load_config(TOY, {"seed": seed, **overrides}), folder / "config.yaml")
    rows = [
        f"{i},{i * 640},{i * 2000},{i * 0.5},1280,{'' if reward is None else reward},0.01"
        for i, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.csv").write_text("\n".join([HEAD, *rows]) + "\n" + last)
    (folder / "evaluation.csv").write_text(
        "iteration,frames,seconds,return_mean,return_std,length_mean,episodes,agents/episode_reward\n"
        f"0,0,0,0.5,1,20,100,0.5\n3,1920,1.5,{3.5 + seed},1,20,100,3.5\n"
    )
    (folder / "summary.json").write_text(
        json.dumps({"return_random": 0.25, "return_heuristic": None})
    )
    return folder


def make_groups_run(folder, seed=0, **overrides):
    """A run folder with two groups that have different values."""
    run = make_run(folder, seed, **overrides)
    head = "iteration,frames,cats/episode_reward,dogs/episode_reward"
    (run / "metrics.csv").write_text(f"{head}\n1,640,1,-10\n2,1280,2,-20\n")
    (run / "evaluation.csv").write_text(
        "iteration,frames,return_mean,cats/episode_reward,dogs/episode_reward\n"
        f"0,0,-4,3,-11\n2,1280,-9,{4 + seed},-22\n"
    )
    summary = {"return_random": -3.5, "cats/return_random": 5, "dogs/return_random": -12}
    (run / "summary.json").write_text(json.dumps(summary))
    return run
