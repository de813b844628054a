"""Example of an external simulator: walkers in a square learn to meet.

    torchrl-marl train external_meet_mappo
    python clients/python/example_meet.py --clients 4

With ``--caller`` a fourth agent observes the walkers and calls them to one of four places. Its
recipe, ``external_meet_mappo_iql``, trains it with another algorithm. Needs no packages.
"""

import argparse
import random
import threading

from torchrl_marl_client import Client

N, LIMIT, SPEED = 3, 25, 0.15
PLACES = ((-0.7, -0.7), (-0.7, 0.7), (0.7, -0.7), (0.7, 0.7))


class Meet:
    """Walkers in the square from -1 to 1; the shared reward is minus their mean distance.

    A walker observes its position and the relative positions of the others. With a caller it also
    observes the called place, and the reward is minus the mean distance to that place.
    """

    def __init__(self, seed=None, caller=False):
        self.draw, self.caller = random.Random(seed), caller

    def agents(self):
        """Returns the declaration of the agents."""
        walker = {"n": N, "observation": 2 * N + 2 * self.caller, "action": 2}
        caller = {"n": 1, "observation": 2 * N, "action": {"n_actions": len(PLACES)}}
        return {"walker": walker, "caller": caller} if self.caller else {"walker": walker}

    def begin(self):
        """Begins an episode, and returns the observations."""
        self.at = [[self.draw.uniform(-1, 1) for _ in range(2)] for _ in range(N)]
        self.place, self.t = (0.0, 0.0), 0
        return self.observe()

    def observe(self):
        """Returns the observations, agent -> numbers."""
        seen = {}
        for i, (x, y) in enumerate(self.at):
            others = [(a - x, b - y) for j, (a, b) in enumerate(self.at) if j != i]
            called = [(self.place[0] - x, self.place[1] - y)] if self.caller else []
            seen[f"walker_{i}"] = [x, y, *(z for pair in others + called for z in pair)]
        if self.caller:
            seen["caller_0"] = [z for pair in self.at for z in pair]
        return seen

    def step(self, actions):
        """Moves the walkers; returns observations, rewards, and True at the time limit."""
        for i, at in enumerate(self.at):
            for k, move in enumerate(actions[f"walker_{i}"]):
                at[k] = min(1.0, max(-1.0, at[k] + SPEED * min(1.0, max(-1.0, move))))
        middle = [sum(at[k] for at in self.at) / N for k in range(2)]
        if self.caller:
            self.place = PLACES[actions["caller_0"]]
        goal = self.place if self.caller else middle
        far = sum(((x - goal[0]) ** 2 + (y - goal[1]) ** 2) ** 0.5 for x, y in self.at) / N
        self.t += 1
        seen = self.observe()
        return seen, dict.fromkeys(seen, -far), self.t == LIMIT


def play(env, client, episodes=None):
    """Plays episodes; by default without end."""
    while episodes is None or episodes > 0:
        actions = client.begin(env.begin())
        over = False
        while not over:
            seen, rewards, over = env.step(actions)
            if over:
                client.end(rewards, truncated=True, observations=seen)
            else:
                actions = client.step(seen, rewards)
        episodes = episodes and episodes - 1


def main():
    """Runs several clients, each with its environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7777)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--episodes", type=int, help="episodes of each client")
    parser.add_argument("--caller", action="store_true", help="add the calling agent")
    given = parser.parse_args()

    def run(number):
        env = Meet(number, given.caller)
        client = Client(given.host, given.port, env.agents(), name=f"meet{number}")
        try:
            play(env, client, given.episodes)
        except (OSError, EOFError, RuntimeError) as error:
            print(f"client {number} ends: {error}")

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(given.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
