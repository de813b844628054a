// Two walkers on a line, each of which wants to be where its goal is: the smallest simulator that can be a client.
//
//     g++ -std=c++17 -O2 example.cpp -o example && ./example 127.0.0.1 7777 100
//
// Beside it: torchrl-marl train ... env.library=external, or torchrl-marl serve RUN.
#include "torchrl_marl_client.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>

int main(int count, char** given) {
    const std::string host = count > 1 ? given[1] : "127.0.0.1";
    const int port = count > 2 ? std::stoi(given[2]) : 7777, episodes = count > 3 ? std::stoi(given[3]) : 100;
    const torchrl_marl::Names agents = {"walker_0", "walker_1"};
    std::mt19937 random(0);
    std::uniform_real_distribution<float> anywhere(-1, 1);
    try {
        torchrl_marl::Client client(host, port, {{"walker", 2, 2, 1}});
        for (int episode = 0; episode < episodes; ++episode) {
            torchrl_marl::Seen seen;  // where it is, and where it wants to be
            for (const auto& agent : agents) seen[agent] = {anywhere(random), anywhere(random)};
            auto actions = client.begin(seen);
            double total = 0;
            for (int t = 1; t <= 20; ++t) {
                torchrl_marl::Rewards rewards;
                for (const auto& agent : agents) {
                    float& position = seen[agent][0];
                    position += 0.2f * std::clamp(static_cast<float>(actions.at(agent)[0]), -1.0f, 1.0f);
                    total += rewards[agent] = -std::abs(position - seen[agent][1]);
                }
                if (t < 20) actions = client.step(seen, rewards);
                else client.end(rewards, true, seen);  // the time ran out
            }
            std::cout << "episode " << episode << " return " << total / 2 << " version " << client.version << std::endl;
        }
    } catch (const std::runtime_error& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
}
