// A stand-in for the header of the same name on macOS, so that this code path can be compiled and run elsewhere: the same
// function, with one std::thread per call.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

constexpr void* DISPATCH_APPLY_AUTO = nullptr;

inline void dispatch_apply_f(size_t iterations, void* queue, void* context, void (*work)(void*, size_t)) {
    (void)queue;
    std::vector<std::thread> threads;
    for (size_t i = 1; i < iterations; i++) threads.emplace_back(work, context, i);
    work(context, 0);
    for (std::thread& thread : threads) thread.join();
}
