#include "tf_ops/core/usual_criteo_line.h"

#include <algorithm>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hvd_ctr {
namespace {

constexpr int32_t kFields = kCriteoDense + kCriteoSparse;
// Bytes searched for tabs at a time.
constexpr int64_t kBlock = 64;
// Offsets are written in groups, the last of which may hold fewer.
constexpr int32_t kGroup = 8;
// A field longer than this is no usual one. Longer lines must have such fields.
constexpr uint32_t kMaxFieldBytes = 8;
constexpr int64_t kMaxLineBytes = 2 + kFields * (kMaxFieldBytes + 1);

// Arithmetic on the eight bytes of a word. Bytes must be below 0x80, and so must what is added to them: no carry leaves its byte.
constexpr uint64_t kEach = 0x0101010101010101ULL;
constexpr uint64_t kHighBits = 0x80 * kEach;
constexpr uint64_t kZeroDigits = '0' * kEach;

// The first byte of text is the lowest of the word.
inline uint64_t LoadWord(const char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// Bit i: at[i] is a tab.
inline uint64_t TabsOfBlock(const char* at) {
  uint64_t tabs = 0;
#if defined(__SSE2__)
  const __m128i tab = _mm_set1_epi8('\t');
  for (int64_t i = 0; i < kBlock; i += 16) {
    const __m128i equal = _mm_cmpeq_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + i)), tab);
    tabs |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(equal))) << i;
  }
#else
  constexpr uint64_t kLowBits = kHighBits - kEach;
  constexpr uint64_t kGather = 0x0102040810204080ULL;  // Brings the lowest bit of each byte into the highest byte.
  for (int64_t i = 0; i < kBlock; i += 8) {
    const uint64_t differ = LoadWord(at + i) ^ ('\t' * kEach);
    const uint64_t equal = ~(((differ & kLowBits) + kLowBits) | differ | kLowBits);
    tabs |= ((equal >> 7) * kGather >> 56) << i;
  }
#endif
  return tabs;
}

// std::popcount of C++20; the instruction is not part of baseline x86-64.
inline int32_t CountBits(uint64_t x) {
  x -= (x >> 1) & 0x5555555555555555ULL;
  x = (x & 0x3333333333333333ULL) + ((x >> 2) & 0x3333333333333333ULL);
  return static_cast<int32_t>((((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fULL) * kEach) >> 56);
}

// Offsets of all tabs; false unless there are `count` of them. tabs has room for kGroup more. The line has kBlock bytes at least.
inline bool FindTabs(std::string_view line, int32_t count, uint32_t* tabs) {
  const int64_t size = static_cast<int64_t>(line.size());
  int32_t found = 0;
  for (int64_t base = 0; base < size; base += kBlock) {
    // The last block ends with the line; what it shares with the one before is masked.
    const int64_t at = base + kBlock <= size ? base : size - kBlock;
    uint64_t bits = TabsOfBlock(line.data() + at) & (~uint64_t{0} << (base - at));
    const int32_t here = CountBits(bits);
    if (found + here > count) return false;
    // Groups of a fixed number, for the number of tabs in a block would be mispredicted. What is written too much is overwritten.
    for (int32_t i = 0; i < here; i += kGroup) {
      for (int32_t j = 0; j < kGroup; ++j) {
        constexpr uint64_t kSome = uint64_t{1} << (kBlock - 1);  // No bits are left: any offset will do.
        tabs[found + i + j] = static_cast<uint32_t>(at + __builtin_ctzll(bits | kSome));
        bits &= bits - 1;
      }
    }
    found += here;
  }
  return found == count;
}

// The value of up to 8 hexadecimal digits, the last of which is the last byte of `word`; the bytes before the digits are
// replaced. A byte that is no digit sets high bits of *bad. Empty: kCriteoMissingId.
inline int64_t HexValue(uint64_t word, uint32_t digits, uint64_t* bad) {
  // Twice half the shift: all 64 bits go when there are no digits.
  const uint32_t half_shift = 4 * (kMaxFieldBytes - digits);
  const uint64_t field = ~uint64_t{0} << half_shift << half_shift;
  word = (word & field) | (kZeroDigits & ~field);
  const uint64_t lower = word | (0x20 * kEach);
  // High bits: the byte is at least '0', at least ':', at least 'a', at least 'g'.
  const uint64_t decimal = (word + (0x80 - '0') * kEach) & ~(word + (0x80 - ':') * kEach);
  const uint64_t letter = (lower + (0x80 - 'a') * kEach) & ~(lower + (0x80 - 'g') * kEach);
  *bad |= word | ~(decimal | letter);
  const uint64_t is_letter = (word >> 6) & kEach;
  uint64_t value = (word & (0x0f * kEach)) + 9 * is_letter;
  value = ((value << 4) | (value >> 8)) & 0x00ff00ff00ff00ffULL;
  value = ((value << 8) | (value >> 16)) & 0x0000ffff0000ffffULL;
  value = ((value << 16) | (value >> 32)) & 0xffffffffULL;
  return digits == 0 ? kCriteoMissingId : static_cast<int64_t>(value);
}

struct Count {
  uint64_t magnitude;
  bool negative;
};

// The value of an optional '-' and decimal digits at the beginning of `word`, `bytes` of up to 8 in all, then a tab. Empty: 0.
// High bits of *bad as above.
inline Count DecimalValue(uint64_t word, uint32_t bytes, uint64_t* bad) {
  const bool negative = (word & 0xff) == '-';
  const uint32_t digits = bytes - negative;
  *bad |= negative && digits == 0 ? kHighBits : 0;
  const uint32_t half_shift = 4 * (kMaxFieldBytes - digits);
  uint64_t value = ((word >> (8 * negative)) ^ kZeroDigits) << half_shift << half_shift;
  *bad |= value | (value + (0x80 - 10) * kEach);
  value = (value * 10 + (value >> 8)) & 0x00ff00ff00ff00ffULL;
  value = (value * 100 + (value >> 16)) & 0x0000ffff0000ffffULL;
  value = (value * 10000 + (value >> 32)) & 0xffffffffULL;
  return Count{value, negative};
}

}  // namespace

bool ParseUsualLine(std::string_view line, bool has_label, const CountLogTable& logs, const CriteoLineOutput& out) {
  const int64_t size = static_cast<int64_t>(line.size());
  if (size < kBlock || size > kMaxLineBytes) return false;
  const char* const text = line.data();
  *out.label = 0.0f;
  uint32_t tabs[kFields + kGroup];
  const int32_t tab_count = kFields - 1 + has_label;
  if (!FindTabs(line, tab_count, tabs)) return false;
  tabs[tab_count] = static_cast<uint32_t>(size);
  const uint32_t* ends = tabs;
  uint32_t begin = 0;
  if (has_label) {
    if (tabs[0] != 1 || (text[0] != '0' && text[0] != '1')) return false;
    *out.label = text[0] == '1' ? 1.0f : 0.0f;
    ++ends;
    begin = 2;
  }
  uint64_t bad = 0;
  uint32_t longest = 0;
  Count counts[kCriteoDense];
  for (int32_t i = 0; i < kCriteoDense; ++i) {
    // 26 tabs or more follow: the word lies within the line.
    const uint32_t bytes = ends[i] - begin;
    longest = std::max(longest, bytes);
    counts[i] = DecimalValue(LoadWord(text + begin), std::min(bytes, kMaxFieldBytes), &bad);
    begin = ends[i] + 1;
  }
  for (int32_t i = kCriteoDense; i < kFields; ++i) {
    // 13 tabs or more come before: the word that ends with the field does.
    const uint32_t digits = ends[i] - begin;
    longest = std::max(longest, digits);
    out.ids[i - kCriteoDense] = HexValue(LoadWord(text + ends[i] - sizeof(uint64_t)), std::min(digits, kMaxFieldBytes), &bad);
    begin = ends[i] + 1;
  }
  if (longest > kMaxFieldBytes || (bad & kHighBits) != 0) return false;
  for (int32_t i = 0; i < kCriteoDense; ++i) out.dense[i] = SignedCountLog(counts[i].magnitude, counts[i].negative, logs);
  return true;
}

}  // namespace hvd_ctr
