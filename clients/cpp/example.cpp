// Walkers in a square learn to meet: the environment of clients/python/example_meet.py as a client in C++.
//
//     g++ -std=c++17 -O2 example.cpp -o example && ./example 127.0.0.1 7777 100
//
// Its server: torchrl-marl train external_meet_mappo, or torchrl-marl serve RUN for such a run.
#include "torchrl_marl_client.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>

using torchrl_marl::Actions, torchrl_marl::Rewards, torchrl_marl::Seen;

constexpr int N = 3, LIMIT = 25;
constexpr float SPEED = 0.15f;

class Meet {  // the shared reward is minus the mean distance of the walkers
  public:
    explicit Meet(unsigned seed) : random_(seed) {}

    void begin() {
        std::uniform_real_distribution<float> anywhere(-1, 1);
        for (auto& place : at_)
            for (float& x : place) x = anywhere(random_);
    }
    Seen observe() const {  // the walker's position, and the relative positions of the others
        Seen seen;
        for (int i = 0; i < N; ++i) {
            auto& numbers = seen["walker_" + std::to_string(i)] = {at_[i][0], at_[i][1]};
            for (int j = 0; j < N; ++j)
                if (j != i) numbers.insert(numbers.end(), {at_[j][0] - at_[i][0], at_[j][1] - at_[i][1]});
        }
        return seen;
    }
    double step(const Actions& actions) {  // moves the walkers; returns the shared reward
        float middle[2] = {0, 0};
        for (int i = 0; i < N; ++i)
            for (int k = 0; k < 2; ++k) {
                const auto move = static_cast<float>(actions.at("walker_" + std::to_string(i))[k]);
                at_[i][k] = std::clamp(at_[i][k] + SPEED * std::clamp(move, -1.0f, 1.0f), -1.0f, 1.0f);
                middle[k] += at_[i][k] / N;
            }
        double far = 0;
        for (const auto& place : at_) far += std::hypot(place[0] - middle[0], place[1] - middle[1]) / N;
        return -far;
    }

  private:
    std::mt19937 random_;
    float at_[N][2] = {};
};

int main(int count, char** given) {
    const std::string host = count > 1 ? given[1] : "127.0.0.1";
    const int port = count > 2 ? std::stoi(given[2]) : 7777, episodes = count > 3 ? std::stoi(given[3]) : 100;
    try {
        torchrl_marl::Client client(host, port, {{"walker", N, 2 * N, 2}}, "meet");
        Meet environment(0);
        for (int episode = 0; episode < episodes; ++episode) {
            environment.begin();
            Actions actions = client.begin(environment.observe());
            double total = 0;
            for (int t = 1; t <= LIMIT; ++t) {
                const double earned = environment.step(actions);
                const Seen seen = environment.observe();
                Rewards rewards;
                for (const auto& [agent, numbers] : seen) rewards[agent] = earned;
                if (t < LIMIT) actions = client.step(seen, rewards);
                else client.end(rewards, true, seen);  // time limit
                total += earned;
            }
            std::cout << "episode " << episode << " return " << total << " version " << client.version << std::endl;
        }
    } catch (const std::runtime_error& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
}
