// What the check prints: tables in Markdown, and the same as JSON.
#ifndef HVD_CTR_CUDA_CHECK_REPORT_H_
#define HVD_CTR_CUDA_CHECK_REPORT_H_

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/core/status.h"

namespace hvd_ctr {

/// A number with the digits it is printed with, or a text.
struct Cell {
  Cell(const char* t) : text(t) {}                               // NOLINT(google-explicit-constructor)
  Cell(std::string t) : text(std::move(t)) {}                    // NOLINT(google-explicit-constructor)
  Cell(int64_t n) : text(std::to_string(n)), is_number(true) {}  // NOLINT(google-explicit-constructor)
  Cell(double value, int digits);

  std::string text;
  bool is_number = false;
};

struct Table {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<Cell>> rows;
};

struct Report {
  /// Name and value: device, driver, ...
  std::vector<std::pair<std::string, std::string>> facts;
  std::vector<Table> tables;
  /// Goals and whether they were met, for people: they do not decide about the exit status.
  std::vector<std::string> goals;
};

std::string AsMarkdown(const Report& report);
std::string AsJson(const Report& report);
Status WriteText(const std::string& path, const std::string& text);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_CHECK_REPORT_H_
