// Encoding for torchrl_marl_client.hpp: the part of MessagePack that it uses, and the proof of a token.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchrl_marl {

inline std::string big_endian(uint64_t x, int bytes) {
    std::string found;
    for (int i = 8 * (bytes - 1); i >= 0; i -= 8) found += static_cast<char>(x >> i);
    return found;
}
inline std::string pack(const std::string& text) { return '\xdb' + big_endian(text.size(), 4) + text; }
inline std::string pack(const char* text) { return pack(std::string(text)); }
inline std::string pack(int64_t x) { return '\xd3' + big_endian(static_cast<uint64_t>(x), 8); }
inline std::string pack(int x) { return pack(int64_t{x}); }
inline std::string pack(bool x) { return x ? "\xc3" : "\xc2"; }
inline std::string pack(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return '\xcb' + big_endian(bits, 8);
}
inline std::string pack_bytes(const std::string& data) { return '\xc6' + big_endian(data.size(), 4) + data; }
inline std::string pack(const std::vector<bool>& flags) { return pack_bytes({flags.begin(), flags.end()}); }
inline std::string pack(const std::vector<float>& numbers) {  // float32, little endian
    std::string data;
    for (float x : numbers) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        for (int i = 0; i < 32; i += 8) data += static_cast<char>(bits >> i);
    }
    return pack_bytes(data);
}
inline std::string pack(const std::vector<std::string>& names) {
    std::string found = '\xdd' + big_endian(names.size(), 4);
    for (const auto& name : names) found += pack(name);
    return found;
}
template <class T> std::string pack(const std::map<std::string, T>& items) {
    std::string found = '\xdf' + big_endian(items.size(), 4);
    for (const auto& [key, value] : items) found += pack(key) + pack(value);
    return found;
}
struct Map {  // values of different types
    std::string items;
    uint32_t n = 0;
    template <class T> Map& operator()(const char* key, const T& value) {
        items += pack(key) + pack(value), ++n;
        return *this;
    }
};
inline std::string pack(const Map& map) { return '\xdf' + big_endian(map.n, 4) + map.items; }

struct Value {  // a value in an answer
    double number = 0;
    std::string text;
    std::map<std::string, Value> map;
    std::vector<Value> list;
};
class Reader {
    const std::string& data;
    size_t at = 0;
    std::string take(uint64_t n) {
        if (n > data.size() - at) throw std::runtime_error("the server sent half a message");
        return data.substr((at += n) - n, n);
    }
    uint64_t take_number(int bytes) {
        uint64_t found = 0;
        for (unsigned char c : take(bytes)) found = found << 8 | c;
        return found;
    }
    int64_t take_signed(int bytes) {
        const int rest = 64 - 8 * bytes;
        return static_cast<int64_t>(take_number(bytes) << rest) >> rest;
    }
    template <class To, class From> static double as(From bits) {
        To found;
        std::memcpy(&found, &bits, sizeof found);
        return found;
    }

  public:
    explicit Reader(const std::string& message) : data(message) {}
    Value value() {
        const int c = static_cast<uint8_t>(take(1)[0]), width = c & 3;
        const auto size = [&](int first) -> uint64_t {
            return c < 0xc0 ? c & (c < 0xa0 ? 15 : 31) : take_number(1 << (c - first));
        };
        Value x;
        if (c < 0x80 || c >= 0xe0) x.number = static_cast<int8_t>(c);
        else if (c == 0xc2 || c == 0xc3) x.number = c == 0xc3;
        else if (c == 0xca) x.number = as<float>(static_cast<uint32_t>(take_number(4)));
        else if (c == 0xcb) x.number = as<double>(take_number(8));
        else if (c >= 0xcc && c <= 0xcf) x.number = static_cast<double>(take_number(1 << width));
        else if (c >= 0xd0 && c <= 0xd3) x.number = static_cast<double>(take_signed(1 << width));
        else if ((c >= 0xa0 && c < 0xc0) || (c >= 0xd9 && c <= 0xdb)) x.text = take(size(0xd9));
        else if (c >= 0xc4 && c <= 0xc6) x.text = take(size(0xc4));
        else if (c < 0x90 || c >= 0xde)
            for (uint64_t n = size(0xdd); n > 0; --n) { const std::string key = value().text; x.map[key] = value(); }
        else if (c < 0xa0 || c >= 0xdc)
            for (uint64_t n = size(0xdb); n > 0; --n) x.list.push_back(value());
        else if (c != 0xc0) throw std::runtime_error("the server sent an unknown MessagePack type");
        return x;
    }
};

// ---- SHA-256 and HMAC (FIPS 180-4, RFC 2104)

inline std::string sha256(std::string data) {
    static const uint32_t k[64] = {  // FIPS 180-4
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
    };
    std::array<uint32_t, 8> h = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    const uint64_t bits = data.size() * 8;
    data += '\x80';
    while (data.size() % 64 != 56) data += '\0';
    for (int i = 56; i >= 0; i -= 8) data += static_cast<char>(bits >> i);
    const auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
    for (size_t at = 0; at < data.size(); at += 64) {
        uint32_t w[64];
        for (int i = 0; i < 64; ++i) {
            const auto byte = [&](int j) { return static_cast<uint32_t>(static_cast<uint8_t>(data[at + 4 * i + j])); };
            if (i < 16) { w[i] = byte(0) << 24 | byte(1) << 16 | byte(2) << 8 | byte(3); continue; }
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        auto s = h;
        for (int i = 0; i < 64; ++i) {
            const uint32_t one = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) +
                                 ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
            const uint32_t two = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) +
                                 ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            s = {one + two, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
        }
        for (int i = 0; i < 8; ++i) h[i] += s[i];
    }
    std::string digest;
    for (uint32_t word : h)
        for (int i = 24; i >= 0; i -= 8) digest += static_cast<char>(word >> i);
    return digest;
}

inline std::string hmac_sha256(std::string key, const std::string& message) {
    if (key.size() > 64) key = sha256(key);
    key.resize(64, '\0');
    std::string inner = key, outer = key;
    for (char& c : inner) c ^= 0x36;
    for (char& c : outer) c ^= 0x5c;
    return sha256(outer + sha256(inner + message));
}

}  // namespace torchrl_marl
