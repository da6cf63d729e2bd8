// Places for tensors in one segment of symmetric memory, in the form of torch's pluggable allocator. Host code.
//
// torch caches what it gets, so there are few calls: a list of free ranges, searched from the front, is enough. What does
// not fit is allocated as usual: such a tensor is copied when it is sent, nothing fails.
#pragma once

#include <iterator>
#include <map>
#include <mutex>

#include "platform.h"

namespace mt {

class Pool {
 public:
  void set(char* base, uint64_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    free_.clear();
    used_.clear();
    if (bytes > 0) free_[base] = bytes;
  }

  void* take(uint64_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < bytes) continue;
      char* const found = range->first;
      const uint64_t rest = range->second - bytes;
      free_.erase(range);
      if (rest > 0) free_[found + bytes] = rest;
      used_[found] = bytes;
      return found;
    }
    return nullptr;
  }

  // False where the memory is not of this pool.
  bool give(void* pointer) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = used_.find(static_cast<char*>(pointer));
    if (found == used_.end()) return false;
    const auto range = free_.emplace(found->first, found->second).first;
    used_.erase(found);
    const auto next = std::next(range);
    if (next != free_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range == free_.begin()) return true;
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      free_.erase(range);
    }
    return true;
  }

 private:
  static constexpr uint64_t ALIGNMENT = 512;
  std::mutex lock_;
  std::map<char*, uint64_t> free_, used_;
};

constexpr int MAX_POOLS = 64;

inline Pool& pool(int index) {
  static Pool pools[MAX_POOLS];
  return pools[index];
}

// The pool of the tensors that this thread makes now, -1 for none.
inline int& chosen_pool() {
  static thread_local int chosen = -1;
  return chosen;
}

}  // namespace mt
