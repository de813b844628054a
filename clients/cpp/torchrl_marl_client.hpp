// Client for external simulators: C++17 and POSIX sockets, without packages.
//
//     torchrl_marl::Client client("127.0.0.1", 7777, {{"walker", 2, 4, 1}});  // kind, n, observation, actions
//     auto actions = client.begin({{"walker_0", {..}}, {"walker_1", {..}}});  // observations: 4 numbers each
//     while (!over)
//         actions = client.step(seen, {{"walker_0", 1.0}}, {"walker_1"});     // rewards, terminated agents
//     client.end({{"walker_0", 5.0}});                                        // second argument true: time limit
//
// Agents in `seen` act. actions["walker_0"] has a number for each continuous action, or the index of a discrete one. An
// error of the server is thrown as std::runtime_error. After a lost connection the step is repeated, and counts once.
// There is no TLS; use a tunnel.
#pragma once
#include "torchrl_marl_wire.hpp"

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace torchrl_marl {

using Names = std::vector<std::string>;
using Numbers = std::vector<float>;
using Seen = std::map<std::string, Numbers>;                 // agent -> its observation
using Rewards = std::map<std::string, double>;               // agent -> its reward since the last step
using Masks = std::map<std::string, std::vector<bool>>;      // agent -> its action mask
using Actions = std::map<std::string, std::vector<double>>;  // agent -> its action

struct Kind {  // a kind of agents, called name_0, name_1, ...
    std::string name;
    int n, observation, actions;
    bool discrete = false, mask = false;  // discrete: `actions` is their number; mask: action masks are sent
};

class Client {
  public:
    std::string token, name;    // token: by default the variable TORCHRL_MARL_TOKEN
    double patience = 60;       // seconds to try to reconnect
    Numbers state;              // state for critics; its size at the start of the first episode is declared
    int64_t version = 0;        // version of the policy in the last answer

    Client(std::string host, int port, std::vector<Kind> kinds, const std::string& called = "client")
        : name(called), host_(std::move(host)), port_(std::to_string(port)), kinds_(std::move(kinds)) {
        if (const char* given = std::getenv("TORCHRL_MARL_TOKEN")) token = given;
        std::random_device random;
        name += "-" + std::to_string(random()) + std::to_string(random());
    }
    Client(const Client&) = delete;
    ~Client() { close(); }

    Actions begin(const Seen& seen, const Masks& masks = {}) {  // begins an episode
        ++episode_, t_ = -1;
        return step(seen, {}, {}, masks);
    }
    Actions step(const Seen& seen, const Rewards& rewards = {}, const Names& terminated = {}, const Masks& masks = {}) {
        Map message = Map()("type", "step")("observations", seen)("rewards", rewards);
        return ask(message("terminated", terminated)("action_masks", masks));
    }
    void end(const Rewards& rewards = {}, bool truncated = false, const Seen& seen = {}) {  // truncated: time limit
        ask(Map()("type", "end")("observations", seen)("rewards", rewards)("truncated", truncated));
    }
    void close() {
        if (socket_ >= 0) ::close(socket_);
        socket_ = -1;
    }

  private:
    struct Lost {};
    Actions ask(Map message) {
        message("episode", episode_)("t", ++t_);
        if (!state.empty()) message("state", state);
        const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience);
        while (true) try {
            if (socket_ < 0) connect();
            send(pack(message));
            Value answer = receive();
            while (answer.map["episode"].number != episode_ || answer.map["t"].number != t_) answer = receive();
            version = static_cast<int64_t>(answer.map["version"].number);
            Actions actions;
            for (auto& [agent, chosen] : answer.map["actions"].map) {
                if (chosen.list.empty()) actions[agent] = {chosen.number};
                for (const Value& x : chosen.list) actions[agent].push_back(x.number);
            }
            return actions;
        } catch (Lost) {  // the repeated step counts once
            close();
            if (std::chrono::steady_clock::now() > until)
                throw std::runtime_error("no server at " + host_ + ":" + port_);
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
        }
    }
    void connect() {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(host_.c_str(), port_.c_str(), &hints, &found))
            throw std::runtime_error("unknown host " + host_);
        for (addrinfo* one = found; one && socket_ < 0; one = one->ai_next) {
            socket_ = ::socket(one->ai_family, one->ai_socktype, one->ai_protocol);
            if (socket_ >= 0 && ::connect(socket_, one->ai_addr, one->ai_addrlen)) close();
        }
        freeaddrinfo(found);
        if (socket_ < 0) throw Lost();
        const int yes = 1;
        setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        std::map<std::string, Map> agents;
        for (const Kind& kind : kinds_) {
            Map& own = agents[kind.name]("n", kind.n)("observation", kind.observation);
            if (kind.discrete) own("action", Map()("n_actions", kind.actions)("mask", kind.mask));
            else own("action", kind.actions);
        }
        Map hello = Map()("type", "hello")("protocol", 1)("client", name)("agents", agents);
        if (!state.empty()) hello("state_size", static_cast<int>(state.size()));
        const std::string proof = hmac_sha256(token, receive().map["nonce"].text);
        hello.items += pack("proof") + pack_bytes(proof), ++hello.n;
        send(pack(hello));
        receive();
    }
    void send(const std::string& body) {
        std::string data;
        for (int i = 0; i < 32; i += 8) data += static_cast<char>(body.size() >> i);
        data += body;
        for (size_t at = 0; at < data.size();) {
            const ssize_t n = ::send(socket_, data.data() + at, data.size() - at, MSG_NOSIGNAL);
            if (n <= 0) throw Lost();
            at += n;
        }
    }
    std::string read(size_t n) {
        std::string data(n, '\0');
        for (size_t at = 0; at < n;) {
            const ssize_t got = recv(socket_, &data[at], n - at, 0);
            if (got <= 0) throw Lost();
            at += got;
        }
        return data;
    }
    Value receive() {
        uint32_t size = 0;
        const std::string length = read(4);
        for (int i = 3; i >= 0; --i) size = size << 8 | static_cast<uint8_t>(length[i]);
        const std::string body = read(size);
        Value message = Reader(body).value();
        if (message.map["type"].text == "error") {
            close();
            throw std::runtime_error(message.map["message"].text);
        }
        return message;
    }

    std::string host_, port_;
    std::vector<Kind> kinds_;
    int64_t episode_ = 0, t_ = -1;
    int socket_ = -1;
};

}  // namespace torchrl_marl
